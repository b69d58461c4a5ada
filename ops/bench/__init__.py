"""Benchmarks of the service against the libraries it wraps: `python -m ops.bench [NAME...]`, one JSON file each.

Both sides of a comparison are measured in one run. They alternate, and one is idle while the other runs. Times are
wall-clock seconds from `time.perf_counter`, reported in milliseconds.
"""
