"""Starts this process as a Celery worker with the options every Tinsmith worker has."""

from __future__ import annotations

from collections.abc import Sequence


def run_worker(queue: str, node: str, pool: Sequence[str]) -> None:
    """Does not return before the worker has shut down. Gossip and mingle are for worker-to-worker news we don't use."""
    from workers.celery_app import app

    app.worker_main(
        ["worker", "-Q", queue, "-n", f"{node}@%h", "-l", "INFO", "--without-gossip", "--without-mingle", *pool]
    )
