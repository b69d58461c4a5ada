"""Rings again for what waits too long, and gives up gaps: the answer to every lost Celery message.

Every worker runs the thread; the one that holds the lead acts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import redis

from app import ids
from app.settings import EngineSettings
from app.stores.interfaces import OpLog, Pending

log = logging.getLogger(__name__)
_PERIOD_S = 2.0
# What a live worker began is likely still running; but it may have been dropped, after an error or an outage.
_RUNNING_FACTOR = 6


class Sweeper:
    """`ring(kind, request id, parent id, queue)` is the doorbell."""

    def __init__(
        self, oplog: OpLog, ring: Callable[[str, str, str, str], None], settings: EngineSettings, worker: str
    ) -> None:
        self._oplog, self._ring, self._settings, self._worker = oplog, ring, settings, worker
        self._rung: dict[str, float] = {}
        self._healthy_since = time.monotonic()
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._loop, name="sweeper", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def sweep(self) -> None:
        """One round."""
        if not self._oplog.lead("sweeper", self._worker):
            self._healthy_since = time.monotonic()
            return
        now = time.monotonic()
        waiting = self._oplog.pending()
        for pending in waiting:
            if pending.missing:
                self._give_up_gap(pending, now)
            else:
                self._ring_again(pending, now)
        alive = {pending.id for pending in waiting}
        self._rung = {id_: at for id_, at in self._rung.items() if id_ in alive}

    def _ring_again(self, pending: Pending, now: float) -> None:
        patience = self._settings.ring_again_s * (_RUNNING_FACTOR if pending.running else 1)
        if pending.waited_s < patience or now - self._rung.get(pending.id, -patience) < patience:
            return
        self._rung[pending.id] = now
        if pending.seq is None:
            parent_id, request_id = pending.id.rpartition(":")[0], pending.id
        else:
            parent_id, request_id = pending.id, ids.request_id(pending.id, pending.seq)
        log.info("ringing again", extra={"request_id": request_id})
        self._ring(pending.kind, request_id, parent_id, pending.queue)

    def _give_up_gap(self, pending: Pending, now: float) -> None:
        """Only time in which the Op could have been admitted counts: none of an outage we saw."""
        if min(pending.waited_s, now - self._healthy_since) < self._settings.gap_s or pending.seq is None:
            return
        reason = (
            f"seq_id {pending.seq} did not arrive within {self._settings.gap_s:.0f} s: the gradients it belonged to "
            "were dropped, and this call with them; run the batch again"
        )
        if self._oplog.refuse(pending.id, pending.seq, reason, "drop_gradients"):
            log.warning("gave up a gap", extra={"model_id": pending.id, "seq": pending.seq})

    def _loop(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            try:
                self.sweep()
            except (redis.RedisError, OSError) as error:
                log.warning("sweep failed: %s", error)
                self._healthy_since = time.monotonic()
