"""Maintenance of the whole installation, each task done by one worker that leads it."""
