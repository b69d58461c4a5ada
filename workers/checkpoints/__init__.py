"""Checkpoints and snapshots: written, moved, handed over and restored."""
