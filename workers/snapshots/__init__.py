"""Snapshots of live models: when one is due, its way to disk and object store, and restoring from it."""
