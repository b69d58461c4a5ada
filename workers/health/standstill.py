"""How long a backend's call has made no progress: what tells a hung rank or device from a long pass."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


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
