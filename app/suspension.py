"""Suspends requests that wait for a result, so that they need no thread: the part that application and server share.

A server that can do it (app/gunicorn_worker.py) puts a `Suspension` into the WSGI environ under SUSPENSION. The
application suspends the request with it and returns any answer, which is thrown away. Once the request is resumed, or
its time is over, the server calls the application again with the same request, and `is_over` is true: that answer
counts. Under any other server the application finds no Suspension, and waits in its thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

SUSPENSION = "tinsmith.suspension"
SUSPENDED_A_THREAD = 5
"""Requests that may be suspended for each one that may wait in a thread."""
# Suspended requests whose time ends within the same slot are counted together.
_SLOT_S = 0.1


class Suspension:
    """The suspension of one request. `on_resume` gets this object, from any thread and perhaps more than once."""

    def __init__(self, on_resume: Callable[[Any], None]) -> None:
        self.began = time.perf_counter()
        """The time of the first call, in seconds of time.perf_counter."""
        self.seconds = 0.0
        self.is_resumed = self.is_over = False
        self._on_resume = on_resume
        self._leave: Callable[[], None] | None = None

    @property
    def is_suspended(self) -> bool:
        return self._leave is not None and not self.is_over

    def suspend(self, seconds: float, leave: Callable[[], None]) -> None:
        """Suspends the request for at most `seconds` after this call's end. `leave` is called once, when the request no
        longer waits: before the second call, or when its client has gone. It must not block."""
        self.seconds, self._leave = seconds, leave

    def resume(self) -> None:
        """Makes the server call the application again soon. It may come before `suspend`, and it never blocks."""
        self.is_resumed = True
        self._on_resume(self)

    def end(self) -> None:
        """The server's part: the request no longer waits."""
        assert self._leave is not None
        self.is_over = True
        self._leave()


class Ends:
    """Spreads the ends of suspensions over time. Clients poll again at once, so polls that began together would always
    end together, 5,000 within seconds, and other calls would wait for them each time."""

    def __init__(self) -> None:
        self._ending = Counter[int]()

    def take(self, now: float, seconds: float) -> tuple[float, int]:
        """An end in the second half of the next `seconds`, and its slot: the slot with the fewest ends, and of several
        the last."""
        last, half = int((now + seconds) / _SLOT_S), int((now + seconds / 2) / _SLOT_S)
        slots = range(last, half, -1)
        slot = next((slot for slot in slots if slot not in self._ending), None)  # mostly the first one
        if slot is None:
            slot = min(slots, key=self._ending.__getitem__, default=last)
        self._ending[slot] += 1
        return now + seconds - (last - slot) * _SLOT_S, slot

    def free(self, slot: int) -> None:
        """Forgets an end in this slot."""
        self._ending[slot] -= 1
        if not self._ending[slot]:
            del self._ending[slot]
