"""For tests of lists by project: a process that knows no such lists, and the cost of a listing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import redis


@contextmanager
def earlier_version(client: redis.Redis, patterns: Sequence[str]) -> Iterator[None]:
    """A process of a version without the lists at the keys of these patterns: it leaves everything that this version
    leaves, but the lists."""
    kept = {key: client.dump(key) for pattern in patterns for key in client.scan_iter(pattern)}
    yield
    for pattern in patterns:
        for key in [*client.scan_iter(pattern)]:
            client.delete(key)
    for key, value in kept.items():
        client.restore(key, 0, value)


def calls(client: redis.Redis) -> int:
    """Commands that the server has run, also in scripts. A PING does not count: a connection that was idle for 10 s
    sends one by itself."""
    return sum(said["calls"] for name, said in client.info("commandstats").items() if name != "cmdstat_ping")
