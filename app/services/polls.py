"""Held polls: as long as there is room, never at the cost of other requests, and never refused."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from typing import Protocol

import redis

from app.errors import NotFound
from app.settings import ApiSettings
from app.stores.interfaces import Future
from app.stores.redis.client import is_outage
from app.stores.redis.waiting import Waiter
from app.telemetry import HELD_POLLS

_SHORT_HOLD_S = 1.0
_REQUEST_ID = re.compile(r".+:\d{1,19}")


class Futures(Protocol):
    def future(self, request_id: str, owner: str) -> Future:
        """Raises NotFound for an unknown or foreign id (alike), Gone for an expired one."""
        ...


class PollService:
    """Counts the polls it holds; `waiter` wakes one when its result is there."""

    def __init__(self, futures: Futures, waiter: Waiter, settings: ApiSettings) -> None:
        self._futures = futures
        self._waiter = waiter
        self._settings = settings
        self._held = 0
        self._lock = threading.Lock()

    def wait(self, request_id: str, owner: str) -> Future:
        """The future, once it is terminal or the hold is over. Raises NotFound or Gone.

        While Redis is away it still holds for a moment: the SDK polls again at once after a 5xx.
        """
        if not _REQUEST_ID.fullmatch(request_id):
            raise NotFound(f"no future {request_id[:200]!r}")
        with self._hold() as seconds:
            try:
                return self._wait(request_id, owner, seconds)
            except redis.RedisError as error:
                if is_outage(error):
                    time.sleep(min(seconds, _SHORT_HOLD_S))
                raise

    def _wait(self, request_id: str, owner: str, seconds: float) -> Future:
        found = None

        def is_done() -> bool:
            nonlocal found
            found = self._futures.future(request_id, owner)
            return found.result is not None

        if seconds:
            self._waiter.wait(request_id, seconds, is_done)
        return found if found and found.result else self._futures.future(request_id, owner)

    @contextlib.contextmanager
    def _hold(self) -> Iterator[float]:
        with self._lock:
            self._held += 1
            held = self._held
        HELD_POLLS.inc()
        try:
            yield self._seconds(held)
        finally:
            with self._lock:
                self._held -= 1
            HELD_POLLS.dec()

    def _seconds(self, held: int) -> float:
        """How long the poll that makes it `held` polls may wait; the other half of the spare threads stays free."""
        if held <= self._settings.poll_capacity:
            return self._settings.poll_hold_s
        if held <= self._settings.poll_capacity + self._settings.spare_threads // 2:
            return min(_SHORT_HOLD_S, self._settings.poll_hold_s)
        return 0.0
