"""Keeps this worker's leases alive from a thread of its own, so that GPU work cannot let them lapse."""

from __future__ import annotations

import logging
import threading
import time

import redis

from app.stores.interfaces import OpLog

log = logging.getLogger(__name__)


class LeaseKeeper:
    """Renews every id in hand three times a lease. An id that could not be kept is lost until it is added again."""

    def __init__(self, oplog: OpLog, worker: str, lease_s: float) -> None:
        self._oplog, self._worker, self._lease_s = oplog, worker, lease_s
        self._lock = threading.Lock()
        self._kept: set[str] = set()
        self._renewed = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="leases", daemon=True)
        self._thread.start()

    def add(self, id_: str) -> None:
        with self._lock:
            self._kept.add(id_)

    def drop(self, id_: str) -> None:
        with self._lock:
            self._kept.discard(id_)

    def holds(self, id_: str) -> bool:
        with self._lock:
            return id_ in self._kept

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stop.wait(self._lease_s / 3):
            try:
                self._renew()
            except (redis.RedisError, OSError) as error:
                log.warning("could not renew leases: %s", error)
                self._fence_if_silent()

    def _renew(self) -> None:
        with self._lock:
            ids = sorted(self._kept)
        lost = self._oplog.renew(ids, self._worker) if ids else []
        self._renewed = time.monotonic()
        with self._lock:
            self._kept.difference_update(lost)

    def _fence_if_silent(self) -> None:
        """Unheard for a whole lease, we must take every model as someone else's."""
        if time.monotonic() - self._renewed > self._lease_s:
            with self._lock:
                self._kept.clear()
