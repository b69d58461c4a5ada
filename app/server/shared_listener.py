"""The part of the API's worker that accepts connections, which it shares with the workers of other processes.

All processes have the same listener. The kernel wakes each of them for a new connection, and the quickest takes it.
That is often the same one every time: of 32 connections it had 29 to 32, and the other core had little to do.
"""

from __future__ import annotations

import mmap
import socket
import time

from gunicorn.workers.gthread import ThreadWorker

_LEFT_S = 0.001
"""Time for which a worker leaves a connection to the others. One that waits for events takes it much sooner."""
_TAKEN = 8
"""Most connections that a worker takes after each such time. Many may wait while another process hangs."""
_SLOTS = 256


class ConnectionCounts:
    """The number of open connections of each worker, in memory that forked processes share."""

    def __init__(self) -> None:
        # 0 is the slot of no worker.
        self._slots = memoryview(mmap.mmap(-1, 8 * _SLOTS)).cast("q")

    def put(self, age: int, count: int) -> None:
        """Sets the count of the worker with this age, gunicorn's number of a worker."""
        self._slots[age % _SLOTS] = count + 1

    def remove(self, age: int) -> None:
        self._slots[age % _SLOTS] = 0

    def least(self) -> int:
        """The smallest count; 0 if there is none."""
        return min(filter(None, self._slots), default=1) - 1


COUNTS = ConnectionCounts()


class SharedListener(ThreadWorker):  # type: ignore[misc]
    """Leaves a new connection to workers with clearly fewer of them for a moment, and takes it if none of them did."""

    _left_until = 0.0

    def accept(self, listener: socket.socket) -> None:
        least = COUNTS.least()
        if self.nr_conns <= least + least // 8 + 1:
            super().accept(listener)
            return
        self._left_until = time.monotonic() + _LEFT_S
        super().set_accept_enabled(False)

    def set_accept_enabled(self, enabled: bool) -> None:
        """gunicorn calls it with True before each wait for events in which it finds accepting turned off.

        A stopping worker refuses new connections: open, the listener would take requests for the seconds that the
        others need, and reset them at the end. A client cannot know whether a call that was reset has begun.
        """
        if enabled and time.monotonic() < self._left_until:
            return
        super().set_accept_enabled(enabled)
        was_left, self._left_until = bool(self._left_until), 0.0
        if enabled and was_left:
            self._take_left()
        if not self.alive:
            COUNTS.remove(self.age)
            for listener in self.sockets:
                listener.close()

    def _take_left(self) -> None:
        for listener in self.sockets:
            for _ in range(_TAKEN):
                super().accept(listener)

    def wait_for_and_dispatch_events(self, timeout: float) -> None:
        if self.alive:
            COUNTS.put(self.age, self.nr_conns)
        if self._left_until and self.nr_conns < self.worker_connections:
            timeout = min(timeout, max(0.0, self._left_until - time.monotonic()))
        super().wait_for_and_dispatch_events(timeout)
