"""Builds the images, starts docker-compose.yml and tries it: `python -m ops.containers images|up|train|down`."""
