"""The worker process: its start, its parts, its liveness, and its end."""
