"""How long a poll is held: as long as there is room, never at the cost of other requests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import redis

from app.errors import TooManyRequests
from app.settings import ApiSettings
from app.stores.redis.client import is_outage
from app.telemetry import HELD_POLLS

_SHORT_HOLD_S = 1.0


class Holds:
    """Counts the polls that are held. A poll is never refused; beyond the capacity it is answered sooner."""

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
        self._held = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def hold(self) -> Iterator[float]:
        """The seconds that the poll which runs in the block may wait.

        While Redis is away it is held for a moment all the same: the SDK polls again at once after a 5xx.
        """
        with self._lock:
            self._held += 1
            seconds = self._seconds(self._held)
        HELD_POLLS.inc()
        try:
            yield seconds
        except redis.RedisError as error:
            if is_outage(error):
                time.sleep(min(seconds, _SHORT_HOLD_S))
            raise
        finally:
            with self._lock:
                self._held -= 1
            HELD_POLLS.dec()

    @contextlib.contextmanager
    def occupy(self) -> Iterator[None]:
        """Count an answer that takes as long as its result as a held poll. Raises TooManyRequests above the capacity:
        whoever waits in it cannot be told to poll again."""
        with self.hold():
            if self._held > self._settings.poll_capacity:
                raise TooManyRequests(f"{self._settings.poll_capacity} calls wait for results here; try again soon")
            yield

    def _seconds(self, held: int) -> float:
        """Of the poll that makes it `held` polls; the other half of the spare threads stays free."""
        if held <= self._settings.poll_capacity:
            return self._settings.poll_hold_s
        if held <= self._settings.poll_capacity + self._settings.spare_threads // 2:
            return min(_SHORT_HOLD_S, self._settings.poll_hold_s)
        return 0.0
