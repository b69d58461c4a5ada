"""Measurements that must stay flat: Redis' keys and memory; every process' memory, file descriptors and threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import psutil

from tests.chaos.observer import writes
from tests.contract.stack import Stack
from tests.soak.trend import Tolerance

TOLERANCES = {
    "keys": Tolerance(0.10, 50),
    "bytes": Tolerance(0.10, 2 * 2**20),
    # Allocators keep memory they once had, and settle late.
    "rss": Tolerance(0.05, 16 * 2**20),
    "fds": Tolerance(0.0, 8),
    "threads": Tolerance(0.0, 8),
}
"""By the last word of a series' name."""


def measure(stack: Stack) -> dict[str, float]:
    """One value per series, "who.what"."""
    return {**dict(_redis(stack)), **dict(_processes(stack))}


def _redis(stack: Stack) -> Iterator[tuple[str, float]]:
    with stack.redis() as client:
        yield "redis.keys", client.dbsize()
        yield "redis.bytes", client.info("memory")["used_memory"]


def _processes(stack: Stack) -> Iterator[tuple[str, float]]:
    assert stack.process is not None
    up = psutil.Process(stack.process.pid)
    yield from _process("up", [up])
    for log in sorted((stack.data_dir / "logs").glob("*.log")):
        yield from _process(log.stem, [child for child in up.children(recursive=True) if writes(child, log)])


def _process(name: str, members: list[psutil.Process]) -> Iterator[tuple[str, float]]:
    """Sum over the processes, because the API is two processes and a rank group more."""
    with suppress(psutil.NoSuchProcess):
        yield f"{name}.rss", sum(member.memory_info().rss for member in members)
        yield f"{name}.fds", sum(member.num_fds() for member in members)
        yield f"{name}.threads", sum(member.num_threads() for member in members)
