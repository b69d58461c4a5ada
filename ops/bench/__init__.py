"""Benches of the service against what it wraps: `python -m ops.bench [NAME...]`, one JSON file each.

Both sides of a comparison are measured in one run, in turns, the other side idle. Times are wall-clock seconds from
`time.perf_counter`, reported in milliseconds.
"""
