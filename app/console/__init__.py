"""The console at /console: runs, curves, checkpoints and the queue for people, in pages that the server renders."""
