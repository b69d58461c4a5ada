"""The scheduler of a trainer's models: the next Op to run, the Ops that share its pass, and those put off.

Doorbells come in the order of the calls, so a model with ten calls would be served ten times before one that called
just behind it, and a project with ten models ten times as often as one with a single one. Turns go round instead: the
project that had the least of the time, by its weight, is served first (workers/process/fair_queue.py), and of its
models the one that waited longest for a turn.

Doorbells are put off at a gap in the journal, or because the object store is away.

Models that no trainer owns are looked for in the backlog: their doorbells may be behind many others in the queue that
all read.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from app import ids
from app.domain.ops import FORWARD, FORWARD_BACKWARD, OptimStep, SaveWeights
from app.stores.interfaces.journal import Entry, Head, OpLog
from workers.process.fair_queue import Shares
from workers.train.committer import Saves
from workers.train.owner import Owner, Resident

# A token's id, target, and weight as the journal holds them; a policy loss has more, and so counts for more.
_TOKEN_BYTES = 16
# A client that was answered sends its next call within milliseconds; what was quiet for longer is not waited for.
_LATELY_S = 1.0
# Of the last pass's time: who comes too late costs a pass of its own. Eight SDK clients of one process need some 150 ms
# to send their calls; with SmolLM2-135M on two cores a pass over 8 x 64 tokens takes 1.2 s.
_WORTH_WAITING = 0.2
_PASSES = (FORWARD, FORWARD_BACKWARD)
_LOOK_AGAIN_S = 0.001

# A load and another save wait, as does what the journal consumed.
_AHEAD_KINDS = (FORWARD, FORWARD_BACKWARD, OptimStep.kind)
# Their results are in memory until they are committed, and they have to run again should the save not come through.
_MOST_AHEAD = 16

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0


class Turns:
    """Others may add `merged_tokens` to a pass; with 0 every Op has one of its own, and its bits depend on no other.

    A pass waits for the next Ops of models that were served lately: several clients in step would else take turns for
    ever, each just missing the other's pass. It waits up to `wait_s` (0: not at all), or a share of what the last pass
    took, if that is longer.

    Models that nobody owns have turns like the others: else they would wait for their doorbells, behind all that a
    project with many of them rang for.
    """

    def __init__(
        self,
        oplog: OpLog,
        owner: Owner,
        ahead: Ahead,
        shares: Shares,
        unowned: Unowned,
        merged_tokens: int,
        wait_s: float,
    ) -> None:
        self._oplog, self._owner, self._ahead, self._shares, self._unowned = oplog, owner, ahead, shares, unowned
        self._most_bytes, self._wait_s = merged_tokens * _TOKEN_BYTES, wait_s
        self._pass_s = 0.0

    def waiting(self) -> list[Head]:
        """What waits next, in the order of its turns, in the models held here and in those that nobody owns; not looked
        up for a single one that nothing holds up."""
        residents = self._owner.residents()
        unowned = [head for head in self._unowned.heads() if head.model_id not in residents]
        if len(residents) < 2 and not unowned and not self._ahead.saves.running():
            return []
        heads = self._oplog.heads({model_id: one.reached + 1 for model_id, one in residents.items()})
        return sorted([*heads, *unowned], key=self._turn)

    def begin(self, project: str) -> None:
        """It is the turn of one of this project's models."""
        self._shares.begin(project)

    def took(self, ran: Sequence[Entry], seconds: float) -> None:
        """How long the Ops of a pass took just now, of which each project is charged its part by their bytes."""
        if ran[0].kind in _PASSES:
            self._pass_s = seconds
        whole = sum(len(entry.payload) for entry in ran)
        for entry in ran:
            part = len(entry.payload) / whole if whole else 1 / len(ran)
            self._shares.charge(entry.owner, seconds * part)

    def is_held_up(self, asked: Resident, waiting: Sequence[Head]) -> bool:
        """Whether the next Op of `asked` has to wait for a save, or is to come while one is being written."""
        mine = _of(asked, waiting)
        return bool(asked.uncommitted) if mine is None else not self._ahead.may_run(asked, mine)

    def before(self, asked: Resident, waiting: Sequence[Head], served: Mapping[str, int]) -> Head | None:
        """What has to run before the next Op of `asked`, behind the seqs that were `served` already, by model; None
        when it is its turn. While that is held up, everything else runs before it.

        An optim_step is let in before a shared pass, since the next batch behind it may then join. An Op that broke a
        worker, or was put off, waits for its own doorbell.
        """
        mine, held_up = _of(asked, waiting), self.is_held_up(asked, waiting)
        for head in waiting:
            if head is not mine and head.seq > served.get(head.model_id, -1) and self._has_a_turn(head):
                joins_later = head.kind == OptimStep.kind and head.model_id not in served and self._shares_pass(mine)
                if held_up or (mine and self._is_before(head, mine)) or (joins_later and self._is_here(head)):
                    return head
        return None

    def company(self, asked: Resident, waiting: Sequence[Head]) -> list[Head]:
        """The Ops of others to share the pass of the next one of `asked`. One that broke a worker before runs alone."""
        mine = _of(asked, waiting)
        if mine is None or not self._shares_pass(mine):
            return []
        joining = (
            head
            for head in self._gathered(waiting)
            if self._is_here(head) and _can_join(head, mine) and self._has_a_turn(head)
        )
        return list(self._within_budget(joining))

    def _turn(self, head: Head) -> tuple[float, float]:
        """The less, the sooner."""
        resident = self._owner.resident(head.model_id)
        return self._shares.place(head.owner), resident.served if resident else 0.0

    def _is_before(self, head: Head, mine: Head) -> bool:
        """One that nobody owns is before other projects' only: beside its own it would be taken in for ever where more
        models are used than a trainer holds."""
        return self._turn(head) < self._turn(mine) and (self._is_here(head) or head.owner != mine.owner)

    def _is_here(self, head: Head) -> bool:
        return self._owner.resident(head.model_id) is not None

    def _has_a_turn(self, head: Head) -> bool:
        resident = self._owner.resident(head.model_id)
        is_put_off = self._ahead.parked.is_put_off(head.model_id)
        return head.fresh and not is_put_off and (resident is None or self._ahead.may_run(resident, head))

    def _shares_pass(self, head: Head | None) -> bool:
        return bool(self._most_bytes and head and head.fresh and head.kind in _PASSES)

    def _gathered(self, waiting: Sequence[Head]) -> Sequence[Head]:
        worth_it = max(self._wait_s, _WORTH_WAITING * self._pass_s) if self._wait_s else 0.0
        deadline = time.monotonic() + worth_it
        while self._is_one_missing(waiting) and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN_S)
            waiting = self.waiting()
        return waiting

    def _is_one_missing(self, waiting: Sequence[Head]) -> bool:
        here = {head.model_id for head in waiting}
        since = time.monotonic() - _LATELY_S - self._pass_s
        return any(one.served > since and model_id not in here for model_id, one in self._owner.residents().items())

    def _within_budget(self, heads: Iterator[Head]) -> Iterator[Head]:
        left = self._most_bytes
        for head in heads:
            if 0 < head.size <= left:
                left -= head.size
                yield head


def _of(asked: Resident, waiting: Sequence[Head]) -> Head | None:
    return next((head for head in waiting if head.model_id == asked.lease.model_id), None)


def _can_join(head: Head, mine: Head) -> bool:
    return head.kind == mine.kind and head.model_id != mine.model_id


@dataclass(frozen=True, slots=True)
class Ahead:
    """A save is in the way of the next step only for the time of a copy. Commits stay in order, so until the save is
    through a result of what ran ahead is nobody's to read, and the journal alone says what the model is: whatever goes
    wrong, the state that ran ahead is thrown away and the journal brings it back."""

    saves: Saves
    parked: Parked

    def may_run(self, resident: Resident, head: Head) -> bool:
        """Whether the model's next Op may run now, as far as saves are concerned.

        Nothing runs ahead that broke a worker before; nor behind a failure, which dooms what waits only when it is
        committed; nor behind a save that was put off, which may be so again and again.
        """
        if head.kind == SaveWeights.kind and not self.saves.has_room(head.model_id):
            return False
        return not resident.uncommitted or (
            head.fresh
            and head.kind in _AHEAD_KINDS
            and len(resident.uncommitted) <= _MOST_AHEAD
            and not resident.uncommitted[-1].failure
            and not self.parked.is_put_off(head.model_id)
        )


@dataclass(frozen=True, slots=True)
class _Pause:
    due: float
    seconds: float


class Parked:
    """`ring(kind, request id, model id, queue)` is the doorbell; `queue` is the one only this worker reads."""

    def __init__(self, ring: Callable[[str, str, str, str], None], queue: str) -> None:
        self._ring, self._queue = ring, queue
        self._kinds: defaultdict[str, dict[int, str]] = defaultdict(dict)
        self._pauses: dict[str, _Pause] = {}

    def park(self, model_id: str, seq: int, kind: str) -> None:
        """To be rung once the model has moved on."""
        self._kinds[model_id][seq] = kind

    def put_off(self, model_id: str, seq: int, kind: str) -> None:
        """To be rung again and again, with longer and longer pauses, until the model has moved on."""
        self.park(model_id, seq, kind)
        self._pauses.setdefault(model_id, _Pause(time.monotonic() + _FIRST_PAUSE_S, _FIRST_PAUSE_S))

    def is_put_off(self, model_id: str) -> bool:
        return model_id in self._pauses

    def moved_on(self, model_id: str) -> None:
        """Ring for all that waits there."""
        waiting = self.forget(model_id)
        for seq in sorted(waiting):
            self._ring_for(model_id, seq, waiting[seq])

    def forget(self, model_id: str) -> dict[int, str]:
        """The model is elsewhere. Returns what waited: kinds by seq."""
        self._pauses.pop(model_id, None)
        return self._kinds.pop(model_id, {})

    def ring_due(self) -> None:
        """Ring for the first of each model whose pause is over; the others follow it."""
        now = time.monotonic()
        for model_id, pause in list(self._pauses.items()):
            if now >= pause.due:
                longer = min(2 * pause.seconds, _LONGEST_PAUSE_S)
                self._pauses[model_id] = _Pause(now + longer, longer)
                seq = min(self._kinds[model_id])
                self._ring_for(model_id, seq, self._kinds[model_id][seq])

    def _ring_for(self, model_id: str, seq: int, kind: str) -> None:
        self._ring(kind, ids.request_id(model_id, seq), model_id, self._queue)


@dataclass
class Unowned:
    """Of a queue's models. A look takes 0.2 ms, or 2 where a thousand things wait; at most `share` of the time goes
    into that."""

    oplog: OpLog
    queue: str
    share: float = 0.01
    _next: float = 0.0

    def heads(self) -> list[Head]:
        """Their next Ops, longest without progress first; nothing when it was looked lately."""
        began = time.monotonic()
        if began < self._next:
            return []
        found = self.oplog.unowned(self.queue)
        ended = time.monotonic()
        self._next = ended + (ended - began) / self.share
        return found
