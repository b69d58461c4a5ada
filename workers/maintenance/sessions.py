"""Expires silent sessions, pauses and resumes their samples, and tears down retired sessions."""

from __future__ import annotations

import logging
import time
from typing import Literal

from app.services.teardown import Teardown
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import PAUSE_S, RedisLifecycle
from app.stores.redis.records import RedisRecords
from workers.maintenance.isolation import isolated
from workers.process import telemetry

log = logging.getLogger(__name__)
# One script corrects this many sessions in 1 ms; 10,000 take two minutes.
_CORRECTED_AT_ONCE = 200
# The samples of a client that is back wait while retired sessions are torn down, so a round stops after some seconds.
# It takes more than twice as long only where an object store hangs: then one run takes three minutes, and a pause
# follows that is this many times as long.
_RETIRING_S = 5.0
_RETIRING_PAUSE_FACTOR = 20


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
