"""`tinsmith demo`: fine-tune the bundled model through the unmodified tinker SDK, and show what changed."""
