"""The device time of sampling requests: the engine's busy time, divided among the requests inside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from workers.backends.sampling.base import RequestHandle


class DeviceClock:
    """Divides the time of `devices` devices at each moment among the requests inside, by their sequences. So the times
    of all requests add up to the time in which any was inside. Safe from any thread.

    `_per_sequence` is the time that one sequence had since the start if it was always inside. It is brought up to date
    when a request enters or leaves.
    """

    def __init__(self, devices: int, now: Callable[[], float] = time.monotonic) -> None:
        self._devices, self._now = devices, now
        self._lock = threading.Lock()
        self._sequences, self._per_sequence, self._at = 0, 0.0, 0.0

    @contextmanager
    def share(self, sequences: int, handle: RequestHandle) -> Iterator[None]:
        """Counts a request of `sequences` sequences while the block runs. At its end `handle` gets the request's
        device time."""
        entered = self._change(sequences)
        try:
            yield
        finally:
            handle.device_ms = round(1000 * sequences * (self._change(-sequences) - entered))

    def _change(self, sequences: int) -> float:
        with self._lock:
            now = self._now()
            if self._sequences:
                self._per_sequence += (now - self._at) * self._devices / self._sequences
            self._at = now
            self._sequences += sequences
            return self._per_sequence
