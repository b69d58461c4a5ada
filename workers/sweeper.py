"""Rings again for what waits too long, and gives up gaps: the answer to every lost Celery message.

Every worker runs the thread; the one that holds the lead acts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import redis

from app import ids
from app.settings import EngineSettings
from app.stores.interfaces import OpLog, Pending

log = logging.getLogger(__name__)
_PERIOD_S = 2.0
_MOST = 10_000
# What a live worker began is likely still running; but it may have been dropped, after an error or an outage.
_RUNNING_FACTOR = 6


# A message that was not lost but waits in a long queue must not be joined by another every few seconds.
_LONGEST_PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Rung:
    """When and for which seq it was rung last, and how long until the next time."""

    at: float
    patience: float
    seq: int | None


class Sweeper:
    """`ring(kind, request id, parent id, queue)` is the doorbell."""

    def __init__(
        self, oplog: OpLog, ring: Callable[[str, str, str, str], None], settings: EngineSettings, worker: str
    ) -> None:
        self._oplog, self._ring, self._settings, self._worker = oplog, ring, settings, worker
        self._rung: dict[str, Rung] = {}
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
        waiting = self._oplog.pending(_MOST)
        for pending in waiting:
            if pending.kinds:
                self._ring_again(pending, now)
            else:
                self._give_up_gap(pending, now)
        alive = {pending.id for pending in waiting}
        self._rung = {id_: rung for id_, rung in self._rung.items() if id_ in alive}

    def _ring_again(self, pending: Pending, now: float) -> None:
        """For all that waits there: it is what one lost doorbell, or a lost broker, leaves behind."""
        patience = self._settings.ring_again_s * (_RUNNING_FACTOR if pending.running else 1)
        rung = self._rung.get(pending.id)
        if rung is None or rung.seq != pending.seq:
            if pending.waited_s < patience:
                return
        elif now - rung.at < rung.patience:
            return
        else:
            patience = min(2 * rung.patience, _LONGEST_PATIENCE_S)
        self._rung[pending.id] = Rung(now, patience, pending.seq)
        log.info("ringing again", extra={"request_id": pending.id, "seq": pending.seq})
        for kind, request_id, parent_id in _futures(pending):
            self._ring(kind, request_id, parent_id, pending.queue)

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


def _futures(pending: Pending) -> Iterator[tuple[str, str, str]]:
    """(kind, request id, parent id) of each that waits."""
    if pending.seq is None:
        yield pending.kinds[0], pending.id, pending.id.rpartition(":")[0]
        return
    for seq, kind in enumerate(pending.kinds, pending.seq):
        yield kind, ids.request_id(pending.id, seq), pending.id
