"""Correctness and speed of training on this machine's GPUs: `python -m ops.gpu_check`, or `make gpu-check`.

Each part needs some packages, and is left out by name where one is missing. A test that alone needs another package is
skipped, and the report says why. Those parts that train need torch (2.11 or later), transformers (5.17 or later), peft,
pydantic, msgpack, psutil and Pillow, and the tests among them pytest, pytest-xdist and hypothesis. Nothing is
downloaded: models have published shapes and random weights.
"""
