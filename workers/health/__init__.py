"""Whether this worker is well, and how others see it."""
