"""How long a call takes this worker, for those who wait behind others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# Of what was known, at each call: the last 50 make up two thirds of the average.
_KEPT = 0.98


class Pace:
    """Calls that run together, in one pass or one batch, end together: so what counts is the time between their ends,
    without that in which nothing ran. May be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._ended = float("-inf")
        self._busy_s = self._calls = 0.0

    def ended(self, took_s: float) -> None:
        """A call that began so long ago has ended just now."""
        with self._lock:
            now = self._clock()
            self._busy_s = _KEPT * self._busy_s + min(took_s, now - self._ended)
            self._calls = _KEPT * self._calls + 1
            self._ended = now

    def seconds(self) -> float:
        """A call's share of the busy time, on average of the last; 0 before the first."""
        with self._lock:
            return self._busy_s / self._calls if self._calls else 0.0
