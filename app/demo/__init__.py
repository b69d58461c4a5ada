"""`tinsmith demo`: fine-tunes the bundled model through the unmodified tinker SDK, and shows the change."""
