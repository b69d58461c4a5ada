"""Failures of a backend: a call that makes no progress, and a pass too large for the memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Standstill:
    """Told by one thread, asked from any. Calls may overlap: what one moves, moves all of them."""

    def __init__(self) -> None:
        self._running = 0
        self._since: float | None = None

    @contextmanager
    def call(self) -> Iterator[None]:
        if not self._running:
            self._since = time.monotonic()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._since = None

    def moved(self) -> None:
        """A part of the call is done; nothing outside of one."""
        if self._since is not None:
            self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the running calls last moved; 0 when none runs."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since


def ran_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: on a GPU torch has a class for it; on a CPU, a RuntimeError of its allocator."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
