"""Measurements that must stay flat: Redis' keys and memory, the object store's disk, and every process' memory, file
descriptors and threads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.chaos.observer import writes
from tests.contract.stack import Stack
from tests.soak.trend import Tolerance, growth

TOLERANCES = {
    "keys": Tolerance(0.10, 50),
    "bytes": Tolerance(0.10, 2 * 2**20),
    # Checkpoints, snapshots and exports; the pages of the audit log and of usage grow for ever, by 1 kB a session.
    "disk": Tolerance(0.10, 8 * 2**20),
    # Allocators keep memory they once had, and settle late.
    "anon": Tolerance(0.05, 16 * 2**20),
    "fds": Tolerance(0.0, 8),
    "threads": Tolerance(0.0, 8),
}
"""By the last word of a series' name."""


def measure(stack: Stack) -> dict[str, float]:
    """One value per series, "who.what"."""
    return {**dict(_redis(stack)), "objects.disk": _disk(stack), **dict(_processes(stack))}


def judge(series: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Faults by the name of the series; empty when all are flat."""
    faults = {name: growth(values, TOLERANCES[name.rpartition(".")[2]]) for name, values in series.items()}
    return {name: fault for name, fault in faults.items() if fault}


def _redis(stack: Stack) -> Iterator[tuple[str, float]]:
    with stack.redis() as client:
        yield "redis.keys", client.dbsize()
        yield "redis.bytes", client.info("memory")["used_memory"]


def _disk(stack: Stack) -> float:
    total = 0
    for folder, _, names in os.walk(stack.data_dir / "objects"):  # walk leaves out a folder that was removed meanwhile
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(folder, name).stat().st_size
    return total


def _processes(stack: Stack) -> Iterator[tuple[str, float]]:
    assert stack.process is not None
    up = psutil.Process(stack.process.pid)
    yield from _process("up", [up], stack.port)
    for log in sorted((stack.data_dir / "logs").glob("*.log")):
        yield from _process(
            log.stem, [child for child in up.children(recursive=True) if writes(child, log)], stack.port
        )


def _process(name: str, members: list[psutil.Process], port: int) -> Iterator[tuple[str, float]]:
    """Sum over the processes, because the API is two processes and a rank group more."""
    with suppress(psutil.NoSuchProcess):
        yield f"{name}.anon", sum(anonymous(member) for member in members)
        yield f"{name}.fds", sum(descriptors(member, port) for member in members)
        yield f"{name}.threads", sum(member.num_threads() for member in members)


def anonymous(process: psutil.Process) -> int:
    """Bytes in memory that the process wrote itself. Pages of files come and go as the system needs memory: a busy hour
    took 40 MB of libraries from a trainer, and gave them back."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def descriptors(process: psutil.Process, port: int) -> int:
    """The process's file descriptors, without the connections to `port` that clients keep open: their number is the
    clients' choice. A connection whose client has gone counts until the process closes it."""
    connections = process.net_connections("tcp")
    clients = [each for each in connections if each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED]
    return int(process.num_fds()) - len(clients)
