"""`tinsmith up`: the whole stack on one machine, as supervised child processes.

options ─ config.resolve ─ Settings ─ checks ─ folder (lock, kept secrets) ─ valkey, processes ─ supervisor
"""
