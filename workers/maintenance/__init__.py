"""Maintenance of the whole installation, done by one leading worker."""
