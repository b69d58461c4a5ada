"""Waking held polls: one pub/sub connection a process, one Event a waiter.

A connection for every held poll would cost 1,000 sockets at 1,000 polls; this costs one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable

import redis

from app.stores.redis import keys

log = logging.getLogger(__name__)
_RECONNECT_S = 0.2


class Waiter:
    """Waits for a request id to become terminal. Publications missed during a reconnect wake everybody instead."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._lock = threading.Lock()
        self._events: dict[str, set[threading.Event]] = defaultdict(set)
        self._subscribed = threading.Event()
        threading.Thread(target=self._listen, name="waiter", daemon=True).start()

    def wait(self, request_id: str, timeout_s: float, check: Callable[[], bool]) -> None:
        """Return once `request_id` is published, after `timeout_s`, or at once if `check()` says it is done.

        `check` runs after the waiter is registered, so a result that lands in between is not missed.
        """
        event = threading.Event()
        with self._lock:
            self._events[request_id].add(event)
        try:
            self._subscribed.wait(min(timeout_s, 5))
            if not check():
                event.wait(timeout_s)
        finally:
            with self._lock:
                self._events[request_id].discard(event)
                if not self._events[request_id]:
                    del self._events[request_id]

    def _listen(self) -> None:
        while True:
            try:
                self._listen_once()
            except (redis.RedisError, OSError) as error:
                log.warning("lost the wake-up channel: %s", error)
            self._subscribed.clear()
            self._wake_all()
            time.sleep(_RECONNECT_S)

    def _listen_once(self) -> None:
        with self._redis.pubsub() as channel:  # type: ignore[no-untyped-call]
            channel.subscribe(keys.DONE_CHANNEL)
            for message in channel.listen():
                if message["type"] == "subscribe":
                    self._wake_all()
                    self._subscribed.set()
                elif message["type"] == "message":
                    self._wake(message["data"].decode())

    def _wake(self, request_id: str) -> None:
        with self._lock:
            for event in self._events.get(request_id, ()):
                event.set()

    def _wake_all(self) -> None:
        with self._lock:
            for events in self._events.values():
                for event in events:
                    event.set()
