"""Failures of a backend: a stall detector, and a test for passes that do not fit in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StallDetector:
    """Stall detector: measures the time since the running calls last made progress.

    One thread reports progress; any thread may read it. Calls may overlap: progress of one counts for all of them.
    """

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

    def progress(self) -> None:
        """Reports that a part of the call is done. Does nothing while no call runs."""
        if self._since is not None:
            self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the running calls last made progress; 0 when no call runs."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since


def ran_out_of_memory(error: Exception) -> bool:
    """Returns whether an allocation failed: torch's own class on a GPU; an AcceleratorError where the driver allocates,
    as pinned memory or a kernel at its first use; a RuntimeError of the allocator on a CPU, of cuBLAS, of cuDNN, or of
    Triton, which loads a kernel too."""
    if isinstance(error, torch.AcceleratorError):
        return str(error).startswith("CUDA error: out of memory")
    said = (
        "DefaultCPUAllocator",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
        "Triton Error [CUDA]: out of memory",
    )
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(one in str(error) for one in said)


def lost_device(error: Exception) -> bool:
    """Returns whether all later calls of the device fail too. After a failed allocation they do not."""
    return isinstance(error, torch.AcceleratorError) and not ran_out_of_memory(error)
