"""Rings again for what waits too long, and gives up gaps: the answer to every lost Celery message."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from app import ids
from app.settings import EngineSettings
from app.stores.interfaces.journal import OpLog, Pending
from workers.sample.admission import Held

log = logging.getLogger(__name__)
# Rows asked for at once. A script looks at all of them in one go while everybody else waits for the server: 10 ms for
# these, where 10,000 rows with all their kinds took a second.
_SLICE = 500
_MOST = 10_000
# What a live worker began is likely still running; but it may have been dropped, after an error or an outage.
_RUNNING_FACTOR = 6
# One worker was rung, as it had room: so long it takes only if it is gone, or stands still.
_AWAITED_S = 3.0
# A message that was not lost but waits in a long queue must not be joined by another every few seconds.
_LONGEST_PATIENCE_S = 60.0
# Seqs given up in one round: a client that leaves out millions waits longer, not everybody else.
_GAP_MOST = 1_000
# A round that comes later than this follows an outage, or another leader's time.
_UNSEEN_S = 10.0


@dataclass(frozen=True, slots=True)
class Rung:
    """When it was rung last, for which seq and whether that ran then, and how long until the next time."""

    at: float
    patience: float
    seq: int | None
    running: bool


class Ringing:
    """`ring(kind, request id, parent id, queue)` is the doorbell."""

    def __init__(self, oplog: OpLog, ring: Callable[[str, str, str, str], None], settings: EngineSettings) -> None:
        self._oplog, self._ring, self._settings = oplog, ring, settings
        self._rung: dict[str, Rung] = {}
        self._healthy_since = self._swept = time.monotonic()

    def sweep(self) -> None:
        now = time.monotonic()
        if now - self._swept > _UNSEEN_S or not self._oplog.takes_calls():
            self._healthy_since = now
        alive, holding = set(), set()
        for pending in self._waiting():
            alive.add(pending.id)
            if pending.held:
                holding.add(pending.queue)
            elif pending.kinds:
                self._ring_again(pending, now)
            else:
                self._give_up_gap(pending, now)
        for queue in holding:  # whoever should have rung for the next of them may have died
            Held(self._oplog, self._ring, queue).ring_next()
        self._rung = {id_: rung for id_, rung in self._rung.items() if id_ in alive}
        self._swept = time.monotonic()

    def _waiting(self) -> Iterator[Pending]:
        """In slices; what moves on in between may be missed, until the next round."""
        for start in range(0, _MOST, _SLICE):
            found = self._oplog.pending(_SLICE, start, depth=1)
            yield from found
            if len(found) < _SLICE:
                return

    def _ring_again(self, pending: Pending, now: float) -> None:
        """For all that waits there: it is what one lost doorbell, or a lost broker, leaves behind."""
        factor = _RUNNING_FACTOR if pending.running else 1
        patience = self._settings.ring_again_s * factor
        if pending.awaited:
            patience = min(patience, _AWAITED_S)
        rung = self._rung.get(pending.id)
        if rung is None or (rung.seq, rung.running) != (pending.seq, pending.running):
            if pending.waited_s < patience:
                return
        elif now - rung.at < rung.patience:
            return
        else:
            patience = min(2 * rung.patience, _LONGEST_PATIENCE_S * factor)
        self._rung[pending.id] = Rung(now, patience, pending.seq, pending.running)
        log.info("ringing again", extra={"request_id": pending.id, "seq": pending.seq})
        for kind, request_id, parent_id in self._futures(pending):
            self._ring(kind, request_id, parent_id, pending.queue)

    def _futures(self, pending: Pending) -> Iterator[tuple[str, str, str]]:
        """(kind, request id, parent id) of each that waits."""
        if pending.seq is None:
            yield pending.kinds[0], pending.id, pending.id.rpartition(":")[0]
            return
        for seq, kind in enumerate(self._oplog.waiting(pending.id, pending.seq), pending.seq):
            yield kind, ids.request_id(pending.id, seq), pending.id

    def _give_up_gap(self, pending: Pending, now: float) -> None:
        """Only time in which the Op could have been admitted counts: none of an outage of Redis or of the API."""
        if min(pending.waited_s, now - self._healthy_since) < self._settings.gap_s or pending.seq is None:
            return
        for seq in range(pending.seq, pending.seq + _GAP_MOST):
            reason = (
                f"seq_id {seq} did not arrive within {self._settings.gap_s:.0f} s: the gradients it belonged to were "
                "dropped, and this call with them; run the batch again"
            )
            if not self._oplog.refuse(pending.id, seq, reason, "drop_gradients"):
                return  # the first that is there
            log.warning("gave up a gap", extra={"model_id": pending.id, "seq": seq})
