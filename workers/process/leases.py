"""Renews this worker's leases from a thread of its own, so that GPU work cannot let them lapse."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

import redis

from app.stores.redis.journal import RedisOpLog

log = logging.getLogger(__name__)


class LeaseKeeper:
    """Renews every held id three times per lease time. The renewal also shows that this worker lives, even when it
    holds none.

    A lease that could not be renewed in time, or that someone else holds, is lost until it is added again.
    """

    def __init__(self, oplog: RedisOpLog, worker: str, lease_s: float) -> None:
        self._oplog, self._worker, self._lease_s = oplog, worker, lease_s
        self._lock = threading.Lock()
        self._renewed: dict[str, float] = {}
        self._lost: dict[str, Callable[[], None]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="leases", daemon=True)
        self._thread.start()

    def add(self, id_: str, asked: float, lost: Callable[[], None] = lambda: None) -> None:
        """Adds a lease that was requested at `asked` (monotonic) and gained; the server counts its time from about
        then.

        The renewing thread calls `lost` if a renewal finds that the lease is no longer ours.
        """
        with self._lock:
            self._renewed[id_] = asked
            self._lost[id_] = lost

    def drop(self, id_: str) -> None:
        with self._lock:
            self._renewed.pop(id_, None)
            self._lost.pop(id_, None)

    def holds(self, id_: str) -> bool:
        """True if the lease is ours and has not expired, as far as this process knows."""
        with self._lock:
            return time.monotonic() - self._renewed.get(id_, -math.inf) < self._lease_s

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stop.wait(self._lease_s / 3):
            try:
                self._renew()
            except (redis.RedisError, OSError) as error:
                log.warning("could not renew leases: %s", error)

    def _renew(self) -> None:
        asked = time.monotonic()
        with self._lock:
            before = dict(self._renewed)
        gone = set(self._oplog.renew(sorted(before), self._worker))
        lost = []
        with self._lock:
            for id_, since in before.items():
                # A lease dropped meanwhile stays dropped. A lease acquired anew is not the one that was renewed.
                if self._renewed.get(id_) == since:
                    if id_ in gone:
                        del self._renewed[id_]
                        lost.append(self._lost.pop(id_))
                    else:
                        self._renewed[id_] = asked
        for tell in lost:
            tell()
