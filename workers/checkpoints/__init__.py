"""Checkpoints and snapshots: written, transferred and restored."""
