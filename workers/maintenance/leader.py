"""Maintenance of the whole installation, run by elected leaders.

Every worker runs a thread for each maintenance task; among all workers, the leader of a task does it. So a task that
fails or takes long does not stop the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Protocol

import redis

from app.errors import Unavailable
from app.services.teardown import Teardown
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.payloads import RedisPayloads

log = logging.getLogger(__name__)
_PERIOD_S = 2.0

# One batch in each round: between two rounds the lead may pass to another worker.
_BATCH = 64


class Sweeper:
    """Runs the maintenance tasks. `tasks` holds them by the name of their role. A task may run twice at once, when the
    lead changes in the middle of a round."""

    def __init__(self, oplog: RedisOpLog, tasks: Mapping[str, MaintenanceTask], worker: str) -> None:
        self._oplog, self._tasks, self._worker = oplog, tasks, worker
        self._stop = threading.Event()

    def start(self) -> None:
        for role in self._tasks:
            threading.Thread(target=self._loop, args=(role,), name=role, daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def sweep(self) -> None:
        """Runs one round of every task."""
        for role in self._tasks:
            self._round(role)

    def _loop(self, role: str) -> None:
        while not self._stop.wait(_PERIOD_S):
            self._round(role)

    def _round(self, role: str) -> None:
        try:
            if self._oplog.lead(role, self._worker):
                self._tasks[role].sweep()
        except (redis.RedisError, OSError, Unavailable) as error:
            log.warning("%s: %s", role, error)
        except Exception:
            log.exception("%s failed", role)


class MaintenanceTask(Protocol):
    def sweep(self) -> None:
        """Runs one round, every few seconds. It may raise: the next round tries again."""
        ...


class SessionExpiry:
    """Expires silent sessions and ends their requests. The owners of their models ask for unwanted ones
    (RedisLifecycle.unwanted) and free the memory."""

    def __init__(self, lifecycle: RedisLifecycle, teardown: Teardown) -> None:
        self._lifecycle, self._teardown = lifecycle, teardown

    def sweep(self) -> None:
        expired = self._lifecycle.expire()
        if expired:
            log.info("%d sessions expired", len(expired))
        for session_id in self._lifecycle.retired():
            self._teardown.retire(session_id)
        aborted = self._lifecycle.abort_samples()
        if aborted:
            log.info("cancelled %d samples of ended sessions", aborted)


class PayloadSpilling:
    """Moves payloads to the object store. While the object store is away nothing moves, and nothing is lost."""

    def __init__(self, payloads: RedisPayloads) -> None:
        self._payloads = payloads

    def sweep(self) -> None:
        """Runs one round. Raises Unavailable."""
        self._payloads.remove_garbage()
        moved = sum(self._payloads.spill(request_id) for request_id in self._payloads.due(_BATCH))
        if moved:
            log.info("moved %d payloads to the object store", moved)
