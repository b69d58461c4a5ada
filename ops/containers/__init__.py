"""Builds the images, starts docker-compose.yml and tests it: `python -m ops.containers images|up|train|down`."""
