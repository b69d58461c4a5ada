"""Connections to the state server, and the pub/sub channel that wakes held polls.

Waking held polls: one pub/sub connection a process, one Event a waiter.

A connection for every held poll would cost 1,000 sockets at 1,000 polls; this costs one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import cast

import redis

from app import ids
from app.stores.redis import keys

log = logging.getLogger(__name__)
# redis-py's own pool raises at its 100th connection; 1,200 threads that wait their turn need far fewer.
_CONNECTIONS = 64
_WAIT_S = 10
_OUTAGES = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.OutOfMemoryError,
    redis.ReadOnlyError,
    redis.exceptions.MasterDownError,
)
# Answers redis-py has no class for: a full disk under the append-only file, missing replicas, a slow script.
_PASSING = ("MISCONF ", "NOREPLICAS ", "BUSY ")

_RECONNECT_S = 0.2


def connect(url: str) -> redis.Redis:
    """A thread-safe client. Raises redis.ConnectionError only at use.

    No socket timeout: redis-py 8 defaults to 5 s, which cuts pub/sub and slow saves. Keepalive finds dead peers.
    """
    pool = redis.BlockingConnectionPool.from_url(
        url,
        max_connections=_CONNECTIONS,
        timeout=_WAIT_S,
        socket_timeout=None,
        socket_connect_timeout=2,
        socket_keepalive=True,
        health_check_interval=10,
    )
    return redis.Redis.from_pool(pool)


def is_outage(error: redis.RedisError) -> bool:
    """Whether it passes: the server is away, still loading, full, or may not write just now."""
    return isinstance(error, _OUTAGES) or str(error).startswith(_PASSING)


def read_hash(client: redis.Redis, key: str) -> dict[bytes, bytes]:
    """A hash's fields; the client's types also allow for text answers, which `connect` never asks for."""
    return cast(dict[bytes, bytes], client.hgetall(key))


def text_fields(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in fields.items()}


class Channel:
    """Tells `heard` of every message, and `missed` when some may have been lost: at each loss and each new beginning of
    the connection. Both are called from the thread and must not block."""

    def __init__(
        self, client: redis.Redis, name: str, heard: Callable[[str], None], missed: Callable[[], None] = lambda: None
    ) -> None:
        self._redis, self._name, self._heard, self._missed = client, name, heard, missed
        self.listening = threading.Event()
        """Set while messages are heard."""

    def start(self) -> None:
        threading.Thread(target=self._listen, name=f"listening on {self._name}", daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                self._listen_once()
            except (redis.RedisError, OSError) as error:
                log.warning("lost the channel %s: %s", self._name, error)
            self.listening.clear()
            self._missed()
            time.sleep(_RECONNECT_S)

    def _listen_once(self) -> None:
        with self._redis.pubsub() as channel:  # type: ignore[no-untyped-call]
            channel.subscribe(self._name)
            for message in channel.listen():
                if message["type"] == "subscribe":
                    self._missed()
                    self.listening.set()
                elif message["type"] == "message":
                    self._heard(message["data"].decode())


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
