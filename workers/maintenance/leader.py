"""Maintenance of the whole installation, run by elected leaders, and its small tasks: sessions and spilling.

Every worker runs a thread for each maintenance task; among all workers, the leader of a task does it. So a task that
fails or takes long does not stop the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Literal, Protocol

import redis

from app.errors import Unavailable
from app.services.teardown import Teardown
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import PAUSE_S, RedisLifecycle
from app.stores.redis.payloads import RedisPayloads
from app.stores.redis.records import RedisRecords
from workers.maintenance.isolation import isolated
from workers.process import telemetry

log = logging.getLogger(__name__)
_PERIOD_S = 2.0
# One batch in each round: between two rounds the lead may pass to another worker.
_BATCH = 64

# One script corrects this many sessions in 1 ms; 10,000 take two minutes.
_CORRECTED_AT_ONCE = 200

# The samples of a client that is back wait while retired sessions are torn down, so a round stops after some seconds.
# It takes more than twice as long only where an object store hangs: then one run takes three minutes, and a pause
# follows that is this many times as long.
_RETIRING_S = 5.0
_RETIRING_PAUSE_FACTOR = 20


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


class SessionExpiry:
    """Pauses the samples of silent sessions, expires these sessions, ends their requests, and sends the task events of
    all futures that ended so or were cancelled. The owners of their models ask for unwanted ones
    (RedisLifecycle.unwanted) and free the memory.

    Only time in which calls were taken counts as silence. After an outage, or a sleep of the machine, a client has
    `session_s` seconds for a sign of life: until then no session expires, and nothing of an ended one is removed. For
    `PAUSE_S` seconds nothing is paused.
    """

    def __init__(
        self,
        oplog: RedisOpLog,
        lifecycle: RedisLifecycle,
        records: RedisRecords,
        teardown: Teardown,
        session_s: float,
    ) -> None:
        self._oplog, self._lifecycle, self._records, self._teardown = oplog, lifecycle, records, teardown
        self._session_s = session_s
        self._corrected: dict[Literal["sessions", "models"], str] = {"sessions": "", "models": ""}
        self._retiring_due = 0.0

    def sweep(self) -> None:
        taken_s = self._oplog.calls_taken_s()
        if taken_s >= self._session_s and (expired := self._lifecycle.expire()):
            log.info("%d sessions expired", len(expired))
        self._lifecycle.end_calls()  # whoever ended a model may have died
        for namespace, after in self._corrected.items():
            self._corrected[namespace] = self._records.correct_some(namespace, after, _CORRECTED_AT_ONCE)
        aborted = self._lifecycle.abort_samples()
        resumed = self._lifecycle.resume_samples()
        paused = self._lifecycle.pause_samples() if taken_s >= PAUSE_S else 0
        for request_id in self._lifecycle.take_revoked():
            telemetry.op_revoked(request_id)
        if aborted or resumed or paused:
            log.info("samples: %d cancelled with their sessions, %d paused, %d resumed", aborted, paused, resumed)
        if taken_s >= self._session_s:
            self._retire()

    def _retire(self) -> None:
        """Tears down retired sessions for some seconds, unless it pauses. This step alone needs the object store, so it
        is the last. A session that cannot be torn down keeps no other."""
        started = time.monotonic()
        if started < self._retiring_due:
            return
        until = started + _RETIRING_S
        try:
            for session_id in self._lifecycle.retired():
                if time.monotonic() >= until:
                    return
                with isolated(session_id):
                    self._teardown.retire(session_id, until)
        finally:
            took = time.monotonic() - started
            if took > 2 * _RETIRING_S:
                self._retiring_due = time.monotonic() + _RETIRING_PAUSE_FACTOR * took


Move = tuple[Callable[[str], bool], str]
"""A function that moves a payload or a result to the object store, and the request id that it gets."""


class PayloadSpilling:
    """Moves payloads and results to the object store. While it is away nothing moves, and nothing is lost."""

    def __init__(self, payloads: RedisPayloads) -> None:
        self._payloads, self._cursor = payloads, 0
        self._failed: set[Move] = set()
        """The moves that failed when they were last tried."""

    def sweep(self) -> None:
        """Runs one round. Raises Unavailable."""
        self._cursor = self._payloads.forget_results(self._cursor, _BATCH)
        try:
            self._move()
        finally:
            self._payloads.remove_garbage()  # last: an object that cannot be deleted keeps nothing from moving

    def _move(self) -> None:
        """Moves what is due, until a move fails. Those that failed before come last, so a few that cannot be moved keep
        no other."""
        due: list[Move] = [(self._payloads.spill, request_id) for request_id in self._payloads.due(_BATCH)]
        due += [(self._payloads.spill_result, request_id) for request_id in self._payloads.due_results(_BATCH)]
        self._failed.intersection_update(due)
        moved = 0
        for move in sorted(due, key=self._failed.__contains__):
            self._failed.add(move)  # and stays there if the move raises
            spill, request_id = move
            moved += spill(request_id)
            self._failed.remove(move)
        if moved:
            log.info("moved %d payloads and results to the object store", moved)
