"""Dispatches requests again that wait too long, and gives up gaps: this repairs every lost Celery message."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import redis

from app import ids
from app.dispatch import Send, queue_for
from app.settings import EngineSettings
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.types import Pending
from workers.maintenance.isolation import isolated
from workers.sample.admission import ThrottledDispatch

log = logging.getLogger(__name__)
# Rows in one query. The script reads all rows at once while everybody else waits for the server: 10 ms for this many,
# while 10,000 rows with all their kinds took a second.
_SLICE = 500
# Rows in one round. The next round reads the next ones: a base model without a trainer may have so many that are stuck.
_MOST = 10_000
# An Op that a live worker began is likely still running; but it may have been dropped, after an error or an outage.
_RUNNING_FACTOR = 6
# The request was dispatched to one worker, as that had room. It takes longer than this only if the worker is gone or
# stalled.
_AWAITED_S = 3.0
# A message that was not lost but waits in a long queue must not be duplicated every few seconds.
_LONGEST_PATIENCE_S = 60.0
# A last dispatch longer ago tells nothing: its request has ended, or is due in any case. Not every round reads each
# request.
_REMEMBERED_S = 2 * _LONGEST_PATIENCE_S * _RUNNING_FACTOR
# A queue with more messages than this, and more than two for each model or request that waits for it, gets none again:
# perhaps nobody reads it, and it must not fill the broker. Below that bound a lost message is sent again. A queue that
# is read drains fast, because a message for an ended call costs nothing; meanwhile a trainer also runs calls whose
# messages it has not read.
_LONGEST_QUEUE = 1_000
_MESSAGES_EACH = 2
# Seqs given up in one round. A client that leaves out millions waits longer, instead of everybody else.
_GAP_MOST = 1_000


@dataclass(frozen=True, slots=True)
class LastDispatch:
    """The last redispatch: its time, its seq, whether that seq ran then, and the wait in seconds until the next one."""

    at: float
    patience: float
    seq: int | None
    running: bool


class Redispatcher:
    """The redispatch task. `send` dispatches to queues in `broker`."""

    def __init__(
        self,
        oplog: RedisOpLog,
        send: Send,
        settings: EngineSettings,
        broker: redis.Redis,
    ) -> None:
        self._oplog, self._send, self._settings, self._broker = oplog, send, settings, broker
        self._last: dict[str, LastDispatch] = {}
        self._first = 0
        """The first row of the next round."""
        self._numbers = Counter[str]()
        """The models and requests that wait for each queue, as far as the rounds since the first row have read them."""
        self._room: dict[str, int] = {}
        """The messages that each queue may still get in this round."""

    def sweep(self) -> None:
        now, taken_s = time.monotonic(), self._oplog.calls_taken_s()
        waiting = self._waiting()
        self._room = self._room_in_queues(waiting)
        for pending in waiting:
            if pending.throttled:
                continue
            with isolated(pending.id):
                if pending.kinds:
                    self._redispatch(pending, now)
                else:
                    self._give_up_gap(pending, taken_s)
        # The worker that should have dispatched the next throttled request may have died. All queues, because a round
        # may not reach their throttled requests.
        for queue in self._oplog.sample_queues():
            with isolated(queue):
                ThrottledDispatch(self._oplog, self._send, queue).dispatch_next()
        self._last = {id_: last for id_, last in self._last.items() if now - last.at < _REMEMBERED_S}

    def _waiting(self) -> list[Pending]:
        """The waiting requests of this round, read in slices. A request that moves on between two slices may be missed
        until the next pass. An outage ends the reading, and the next round then begins at the first row; what was read
        before is kept."""
        first, self._first = self._first, 0
        count = self._oplog.count_pending()
        if not 0 < first < count:
            first = 0
            self._numbers.clear()
        end = min(first + _MOST, count)
        waiting: list[Pending] = []
        try:
            for start in range(first, end, _SLICE):
                waiting += self._with_queues(self._oplog.pending(_SLICE, start, depth=1))
        except redis.RedisError as error:
            if not waiting:
                raise
            log.warning("only the first %d waiting calls could be read: %s", len(waiting), error)
            return waiting
        if end < count and not any(pending.throttled for pending in waiting):  # behind a throttled one are only such
            self._first = end
        return waiting

    def _with_queues(self, found: Sequence[Pending]) -> Iterator[Pending]:
        """Puts the direct queue of its owner in place of a model's queue. Another trainer would only forward a message,
        to a queue that is not counted."""
        nodes = self._oplog.holders([pending.id for pending in found])
        for pending, node in zip(found, nodes, strict=True):
            yield pending if pending.seq is None else replace(pending, queue=queue_for(pending.queue, node))

    def _room_in_queues(self, waiting: Sequence[Pending]) -> dict[str, int]:
        self._numbers.update(pending.queue for pending in waiting if pending.kinds and not pending.throttled)
        lengths = self._lengths(list(self._numbers))
        return {
            queue: max(_LONGEST_QUEUE, _MESSAGES_EACH * number) - length
            for (queue, number), length in zip(self._numbers.items(), lengths, strict=True)
        }

    def _lengths(self, queues: Sequence[str]) -> Sequence[int]:
        """The messages in each queue; 0 while the broker is away. No message has a priority, so a queue is one list."""
        try:
            with self._broker.pipeline(transaction=False) as pipe:
                for queue in queues:
                    pipe.llen(queue)
                return [int(length) for length in pipe.execute()]
        except (redis.RedisError, OSError):
            return [0] * len(queues)

    def _redispatch(self, pending: Pending, now: float) -> None:
        """Dispatches all waiting requests of `pending` again: one lost dispatch, or a lost broker, may leave all of
        them."""
        factor = _RUNNING_FACTOR if pending.running else 1
        patience = self._settings.ring_again_s * factor
        if pending.awaited:
            patience = min(patience, _AWAITED_S)
        last = self._last.get(pending.id)
        if last is None or (last.seq, last.running) != (pending.seq, pending.running):
            if abs(pending.waited_s) < patience:  # far below 0 after the server's clock was set back
                return
        elif now - last.at < last.patience:
            return
        else:
            patience = min(2 * last.patience, _LONGEST_PATIENCE_S * factor)
        if self._room[pending.queue] <= 0:
            return
        self._last[pending.id] = LastDispatch(now, patience, pending.seq, pending.running)
        log.info("dispatching again", extra={"request_id": pending.id, "seq": pending.seq})
        for kind, request_id, parent_id in self._futures(pending):
            self._send(kind, request_id, parent_id, pending.queue)
            self._room[pending.queue] -= 1

    def _futures(self, pending: Pending) -> Iterator[tuple[str, str, str]]:
        """(kind, request id, parent id) of each waiting request."""
        if pending.seq is None:
            yield pending.kinds[0], pending.id, ids.parent_of(pending.id)
            return
        for seq, kind in enumerate(self._oplog.waiting(pending.id, pending.seq), pending.seq):
            yield kind, ids.request_id(pending.id, seq), pending.id

    def _give_up_gap(self, pending: Pending, taken_s: float) -> None:
        """Gives up a gap in the journal after `gap_s`. Only time in which the Op could have been admitted counts, so no
        outage of Redis or of the API does, and no sleep of the machine. `taken_s`: see RedisOpLog.calls_taken_s."""
        waited_s = abs(pending.waited_s)  # far below 0 after the server's clock was set back, which `taken_s` begins at
        if min(waited_s, taken_s) < self._settings.gap_s or pending.seq is None:
            return
        for seq in range(pending.seq, pending.seq + _GAP_MOST):
            reason = (
                f"seq_id {seq} did not arrive within {self._settings.gap_s:.0f} s: this call and the other gradients "
                "of the same step were dropped; run the batch again (the SDK may have raised an error for the missing "
                "call before it sent it)"
            )
            if not self._oplog.refuse(pending.id, seq, reason, "drop_gradients"):
                return  # the first seq that has arrived
            log.warning("a missing seq was given up", extra={"model_id": pending.id, "seq": seq})
