"""Maintenance of the whole installation, run by elected leaders.

Every worker runs a thread for each maintenance task; among all workers, the leader of a task does it. So a task that
fails or takes long does not stop the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

import redis

from app.errors import Unavailable
from app.stores.redis.journal import RedisOpLog

log = logging.getLogger(__name__)
_PERIOD_S = 2.0


class MaintenanceRunner:
    """Runs the maintenance tasks. `tasks` holds them by the name of their role. A task may run twice at once, when the
    lead changes in the middle of a round."""

    def __init__(self, oplog: RedisOpLog, tasks: Mapping[str, MaintenanceTask], worker: str) -> None:
        self._oplog, self._tasks, self._worker = oplog, tasks, worker
        self._stop = threading.Event()

    def start(self) -> None:
        for role in self._tasks:
            threading.Thread(target=self._loop, args=(role,), name=role, daemon=True).start()

    def stop(self) -> None:
        """Ends the rounds, and gives up the leads, so that another worker takes them at once and not after a lease."""
        self._stop.set()
        with suppress(redis.RedisError):
            for role in self._tasks:
                with suppress(Unavailable):  # of a replica
                    self._oplog.release(role, self._worker)

    def sweep(self) -> None:
        """Runs one round of every task."""
        for role in self._tasks:
            self._round(role)

    def _loop(self, role: str) -> None:
        while not self._stop.wait(_PERIOD_S):
            self._round(role)

    def _round(self, role: str) -> None:
        try:
            if not self._stop.is_set() and self._oplog.lead(role, self._worker):
                self._tasks[role].sweep()
        except (redis.RedisError, OSError, Unavailable) as error:
            log.warning("the maintenance task %s was put off: %s", role, error)
        except Exception:
            log.exception("the maintenance task %s failed", role)


class MaintenanceTask(Protocol):
    def sweep(self) -> None:
        """Runs one round, every few seconds. It may raise: the next round tries again."""
        ...


class WhileSteady:
    """Runs a task that deletes or closes by the state server's clock only while that clock is steady: calls have been
    taken for `session_s` without a break (RedisOpLog.calls_taken_s). A clock that jumps forward and is set back within
    this time does no harm."""

    def __init__(self, task: MaintenanceTask, oplog: RedisOpLog, session_s: float) -> None:
        self._task, self._oplog, self._session_s = task, oplog, session_s

    def sweep(self) -> None:
        if self._oplog.calls_taken_s() >= self._session_s:
            self._task.sweep()
