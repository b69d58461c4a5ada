"""Waking held polls: one pub/sub connection a process, one Event a waiter.

A connection for every held poll would cost 1,000 sockets at 1,000 polls; this costs one.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable

import redis

from app import ids
from app.stores.redis import keys
from app.stores.redis.channel import Channel


class Waiter:
    """Waits for a request id to become terminal, or for any request of a poll target (app/ids.py). Publications missed
    during a reconnect wake everybody instead.

    On the broker, if given, more of a request's stream is published; who misses that reads it somewhat later."""

    def __init__(self, client: redis.Redis, broker: redis.Redis | None = None) -> None:
        self._lock = threading.Lock()
        self._events: dict[str, set[threading.Event]] = defaultdict(set)
        self._done = Channel(client, keys.DONE_CHANNEL, self._wake, self._wake_all)
        self._done.start()
        if broker is not None:
            Channel(broker, keys.DONE_CHANNEL, self._wake).start()

    def wait(self, id_: str, timeout_s: float, check: Callable[[], bool]) -> None:
        """Return once `id_` is published, after `timeout_s`, or at once if `check()` says it is done.

        `check` runs after the waiter is registered, so a result that lands in between is not missed.
        """
        event = threading.Event()
        with self._lock:
            self._events[id_].add(event)
        try:
            self._done.listening.wait(min(timeout_s, 5))
            if not check():
                event.wait(timeout_s)
        finally:
            with self._lock:
                self._events[id_].discard(event)
                if not self._events[id_]:
                    del self._events[id_]

    def _wake(self, request_id: str) -> None:
        with self._lock:
            for id_ in (request_id, ids.target_of(request_id)):
                for event in self._events.get(id_, ()):
                    event.set()

    def _wake_all(self) -> None:
        with self._lock:
            for events in self._events.values():
                for event in events:
                    event.set()
