"""What is done once for the whole installation: rings for what waits, sessions, stored files.

Every worker runs a thread for each chore, and of all workers the one that holds its lead does it. A chore that fails
or takes long so keeps no other from running.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

import redis

from app.errors import Unavailable
from app.stores.interfaces import OpLog
from workers.chores.base import Chore

log = logging.getLogger(__name__)
_PERIOD_S = 2.0


class Sweeper:
    """`chores` by their role's name. A chore may run twice at once, when the lead changes in the middle of a round."""

    def __init__(self, oplog: OpLog, chores: Mapping[str, Chore], worker: str) -> None:
        self._oplog, self._chores, self._worker = oplog, chores, worker
        self._stop = threading.Event()

    def start(self) -> None:
        for role in self._chores:
            threading.Thread(target=self._loop, args=(role,), name=role, daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def sweep(self) -> None:
        """One round of every chore."""
        for role in self._chores:
            self._round(role)

    def _loop(self, role: str) -> None:
        while not self._stop.wait(_PERIOD_S):
            self._round(role)

    def _round(self, role: str) -> None:
        try:
            if self._oplog.lead(role, self._worker):
                self._chores[role].sweep()
        except (redis.RedisError, OSError, Unavailable) as error:
            log.warning("%s: %s", role, error)
        except Exception:
            log.exception("%s failed", role)
