"""The scheduler of a trainer's models: picks the next Op, the Ops that share its pass, and the Ops to retry later.

Dispatches arrive in the order of the calls. In that order, a model with ten calls would be served ten times before a
model that called just after it, and a project with ten models ten times as often as a project with one. So the
scheduler uses a fair queue instead: the project that had the least of the time, by its weight, is served first
(workers/process/fair_queue.py), and of its models the one that waited longest for a turn.

An Op behind a gap in the journal waits until its model has advanced. An Op is retried with a backoff while the object
store is away.

The backlog scan finds models that no trainer owns: their dispatches may be behind many others in the shared queue.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from app import ids
from app.dispatch import Send
from app.domain.ops import FORWARD, FORWARD_BACKWARD, OptimStep, SaveWeights
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.types import Entry, NextOp
from workers.process.fair_queue import FairQueue
from workers.train.committer import BackgroundSaves
from workers.train.owner import Owner, Resident

# Bytes of a token's id, target and weight in the journal. A policy loss stores more, and so counts for more.
_TOKEN_BYTES = 16
# A client sends its next call within milliseconds of an answer. The pass does not wait for a model that was quiet for
# longer than this.
_RECENT_S = 1.0
# Longest wait, as a share of the last pass's time; a later Op costs a pass of its own. Eight SDK clients of one process
# need some 150 ms to send their calls; with SmolLM2-135M on two cores a pass over 8 x 64 tokens takes 1.2 s.
_WORTH_WAITING = 0.2
_PASSES = (FORWARD, FORWARD_BACKWARD)
# Only these kinds run together with those of other models, and only they run ahead of a save. A load and another save
# wait, as do seqs that the journal consumed.
_COMPUTING = (*_PASSES, OptimStep.kind)
_POLL_S = 0.001

# Results of Ops that ran ahead stay in memory until they are committed, and the Ops run again if the save fails.
_MOST_AHEAD = 16

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0


class Scheduler:
    """The scheduler. Other Ops may add up to `merged_tokens` to a pass; with 0 each Op runs in its own pass, and its
    bits depend on no other Op.

    A pass waits for the next Ops of recently served models. Otherwise several clients in step would take turns forever,
    each just missing the other's pass. It waits up to `wait_s` (0: not at all), or a share of the last pass's time if
    that is longer.

    Models without an owner get turns like the others. Otherwise they would wait for their dispatches, behind all the
    dispatches of a project with many models.
    """

    def __init__(
        self,
        oplog: RedisOpLog,
        owner: Owner,
        run_ahead: RunAhead,
        fair_queue: FairQueue,
        backlog_scan: BacklogScan,
        merged_tokens: int,
        wait_s: float,
    ) -> None:
        self._oplog, self._owner, self._run_ahead = oplog, owner, run_ahead
        self._fair_queue, self._backlog_scan = fair_queue, backlog_scan
        self._most_bytes, self._wait_s = merged_tokens * _TOKEN_BYTES, wait_s
        self._pass_s = 0.0

    def waiting(self) -> list[NextOp]:
        """The next Ops in the order of their turns, of the models held here and of those without an owner. Empty,
        without a journal read, when there is only one model and no save holds it up."""
        residents = self._owner.residents()
        unowned = [head for head in self._backlog_scan.heads() if head.model_id not in residents]
        if len(residents) < 2 and not unowned and not self._run_ahead.background_saves.running():
            return []
        return sorted([*self._heads(), *unowned], key=self._order)

    def begin(self, project: str) -> None:
        """Records that one of this project's models has its turn."""
        self._fair_queue.begin(project)

    def charge(self, entries: Sequence[Entry], seconds: float) -> None:
        """Charges each project its part of the pass's `seconds`, by the bytes of its Ops."""
        if entries[0].kind in _PASSES:
            self._pass_s = seconds
        total = sum(len(entry.payload) for entry in entries)
        for entry in entries:
            part = len(entry.payload) / total if total else 1 / len(entries)
            self._fair_queue.charge(entry.owner, seconds * part)

    def is_blocked(self, asked: Resident, waiting: Sequence[NextOp]) -> bool:
        """True if the next Op of `asked` has to wait for a save, or has not arrived while a save is being written."""
        mine = _head_of(asked, waiting)
        return bool(asked.uncommitted) if mine is None else not self._run_ahead.may_run(asked, mine)

    def next_before(self, asked: Resident, waiting: Sequence[NextOp], served: Mapping[str, int]) -> NextOp | None:
        """The Op that has to run before the next Op of `asked`; None when it is the turn of `asked`. `served` holds, by
        model, the seqs that have already been served. While the next Op of `asked` is held up, all others run before
        it.

        An optim_step runs before a shared pass, since the next batch after it may then join the pass. An Op that broke
        a worker waits for its own dispatch, and one that was put off for the end of its pause.
        """
        mine, blocked = _head_of(asked, waiting), self.is_blocked(asked, waiting)
        for head in waiting:
            if head is mine or head.seq <= served.get(head.model_id, -1) or not self._may_run(head):
                continue
            if blocked or (mine is not None and self._goes_first(head, mine, served)):
                return head
        return None

    def batched_with(self, asked: Resident, waiting: Sequence[NextOp]) -> list[NextOp]:
        """The other models' Ops that share the pass of the next Op of `asked`, or their optim_steps that share its own.
        An Op that broke a worker before runs alone."""
        mine = _head_of(asked, waiting)
        if mine is None or not self._is_shared(mine):
            return []
        # A step takes milliseconds, which is less than another one is worth waiting for.
        joining = (
            head
            for head in (self._await_batch(waiting) if mine.kind in _PASSES else waiting)
            if self._is_resident(head) and _can_join(head, mine) and self._may_run(head)
        )
        return list(self._within_budget(joining))

    def _order(self, head: NextOp) -> tuple[float, float]:
        """The sort key of a turn; the least comes first."""
        resident = self._owner.resident(head.model_id)
        return self._fair_queue.virtual_time(head.owner), resident.served if resident else 0.0

    def _goes_first(self, head: NextOp, mine: NextOp, served: Mapping[str, int]) -> bool:
        """True if `head` has the earlier turn, or is a step behind which a batch may join the pass of `mine`."""
        is_step = head.kind == OptimStep.kind and self._is_resident(head)
        joins_later = is_step and head.model_id not in served and self._is_pass(mine)
        return joins_later or self._has_earlier_turn(head, mine)

    def _has_earlier_turn(self, head: NextOp, mine: NextOp) -> bool:
        """True if `head` has its turn before `mine`. A model without an owner goes before other projects' models only.
        Before its own project's, such models would be restored without end where a project uses more models than a
        trainer holds.
        """
        return self._order(head) < self._order(mine) and (self._is_resident(head) or head.owner != mine.owner)

    def _is_resident(self, head: NextOp) -> bool:
        return self._owner.resident(head.model_id) is not None

    def _may_run(self, head: NextOp) -> bool:
        resident = self._owner.resident(head.model_id)
        is_backing_off = self._run_ahead.retry_backoff.is_backing_off(head.model_id)
        return head.fresh and not is_backing_off and (resident is None or self._run_ahead.may_run(resident, head))

    def _is_pass(self, head: NextOp) -> bool:
        return head.kind in _PASSES and self._is_shared(head)

    def _is_shared(self, head: NextOp) -> bool:
        return bool(self._most_bytes and head.fresh and head.kind in _COMPUTING)

    def _await_batch(self, waiting: Sequence[NextOp]) -> Sequence[NextOp]:
        worth_it = max(self._wait_s, _WORTH_WAITING * self._pass_s) if self._wait_s else 0.0
        deadline = time.monotonic() + worth_it
        while self._is_one_missing(waiting) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            waiting = sorted(self._heads(), key=self._order)
        return waiting

    def _heads(self) -> list[NextOp]:
        """The next Ops of the models held here."""
        return self._oplog.heads({model_id: one.reached + 1 for model_id, one in self._owner.residents().items()})

    def _is_one_missing(self, waiting: Sequence[NextOp]) -> bool:
        here = {head.model_id for head in waiting}
        since = time.monotonic() - _RECENT_S - self._pass_s
        return any(one.served > since and model_id not in here for model_id, one in self._owner.residents().items())

    def _within_budget(self, heads: Iterator[NextOp]) -> Iterator[NextOp]:
        left = self._most_bytes
        for head in heads:
            if 0 < head.size <= left:
                left -= head.size
                yield head


def _head_of(asked: Resident, waiting: Sequence[NextOp]) -> NextOp | None:
    return next((head for head in waiting if head.model_id == asked.model_id), None)


def _can_join(head: NextOp, mine: NextOp) -> bool:
    return head.kind == mine.kind and head.model_id != mine.model_id


@dataclass(frozen=True, slots=True)
class RunAhead:
    """Run ahead: the next steps run while a save is being written, so a save delays them only by the time of a copy.

    Commits stay in order. Until the save is committed, nobody can read a result of an Op that ran ahead, and the
    journal alone defines the model. On any failure the state that ran ahead is discarded, and the journal restores it.
    """

    background_saves: BackgroundSaves
    retry_backoff: RetryBackoff

    def may_run(self, resident: Resident, head: NextOp) -> bool:
        """True if the model's next Op may run now, as far as saves are concerned.

        An Op that broke a worker before does not run ahead. Nothing runs ahead behind a failure, which dooms later Ops
        only when it is committed; nor behind a save that was put off, which may be put off again and again.
        """
        if head.kind == SaveWeights.kind and not self.background_saves.has_room(head.model_id):
            return False
        return not resident.uncommitted or (
            head.fresh
            and head.kind in _COMPUTING
            and len(resident.uncommitted) <= _MOST_AHEAD
            and not resident.uncommitted[-1].failure
            and not self.retry_backoff.was_put_off(head.model_id)
        )


@dataclass(frozen=True, slots=True)
class _Pause:
    due: float
    seconds: float
    lets_pass: bool


class RetryBackoff:
    """Ops that wait for their model, and the retry backoff of those that were put off.

    Only this worker reads `queue`.
    """

    def __init__(self, send: Send, queue: str) -> None:
        self._send, self._queue = send, queue
        self._kinds: defaultdict[str, dict[int, str]] = defaultdict(dict)
        self._pauses: dict[str, _Pause] = {}

    def add(self, model_id: str, seq: int, kind: str) -> None:
        """Keeps an Op, to be dispatched once the model has advanced."""
        self._kinds[model_id][seq] = kind

    def retry_later(self, model_id: str, seq: int, kind: str) -> None:
        """Keeps an Op until the model has advanced. Meanwhile the model backs off, for longer after each retry."""
        self.add(model_id, seq, kind)
        if self.is_backing_off(model_id):
            self._pauses[model_id] = replace(self._pauses[model_id], lets_pass=False)
        else:
            self._pause(model_id)

    def is_backing_off(self, model_id: str) -> bool:
        """True during a pause. Afterwards the scheduler may retry the model, before `retry_due` dispatches it."""
        return self.was_put_off(model_id) and time.monotonic() < self._pauses[model_id].due

    def holds_back(self, model_id: str) -> bool:
        """True if a dispatch of the model must not restore it now. A pause that `retry_due` began lets dispatches pass
        until one of them has failed."""
        return self.is_backing_off(model_id) and not self._pauses[model_id].lets_pass

    def was_put_off(self, model_id: str) -> bool:
        """True until the model has advanced, also while it is retried."""
        return model_id in self._pauses

    def advanced(self, model_id: str, *, ended: int = -1) -> None:
        """Dispatches all Ops that wait for the model, except those up to the seq `ended`."""
        waiting = self.forget(model_id)
        for seq in sorted(waiting):
            if seq > ended:
                self._send_for(model_id, seq, waiting[seq])

    def forget(self, model_id: str) -> dict[int, str]:
        """Drops the model's waiting Ops and its pause. Returns the Ops: kinds by seq."""
        self._pauses.pop(model_id, None)
        return self._kinds.pop(model_id, {})

    def drop(self, model_id: str, seq: int) -> None:
        """Drops an Op that has ended elsewhere. A model without any other waiting Op backs off no longer."""
        waiting = self._kinds[model_id]
        waiting.pop(seq, None)
        if not waiting:
            self.forget(model_id)

    def retry_due(self) -> None:
        """Dispatches the first Op of each model whose pause is over; the others follow it."""
        for model_id in list(self._pauses):
            if not self.is_backing_off(model_id):
                self._pause(model_id, lets_pass=True)
                seq = min(self._kinds[model_id])
                self._send_for(model_id, seq, self._kinds[model_id][seq])

    def _pause(self, model_id: str, *, lets_pass: bool = False) -> None:
        """Begins the model's first pause, or a longer one."""
        last = self._pauses.get(model_id)
        seconds = min(2 * last.seconds, _LONGEST_PAUSE_S) if last else _FIRST_PAUSE_S
        self._pauses[model_id] = _Pause(time.monotonic() + seconds, seconds, lets_pass)

    def _send_for(self, model_id: str, seq: int, kind: str) -> None:
        self._send(kind, ids.request_id(model_id, seq), model_id, self._queue)


@dataclass
class BacklogScan:
    """The backlog scan: finds a queue's models that no trainer owns. A scan takes 0.2 ms, or 2 ms where a thousand
    requests wait; at most `share` of the time goes into scans. Of more requests each scan reads the next thousand, as
    the first thousand may be stuck."""

    oplog: RedisOpLog
    queue: str
    share: float
    _next: float = 0.0
    _page: int = 0

    def heads(self) -> list[NextOp]:
        """The next Ops of models without an owner, longest without progress first; nothing soon after the last scan."""
        began = time.monotonic()
        if began < self._next:
            return []
        found = self.oplog.unowned(self.queue, page=self._page)
        self._page += 1
        ended = time.monotonic()
        self._next = ended + (ended - began) / self.share
        return found
