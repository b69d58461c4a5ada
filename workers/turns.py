"""Whose Op runs next among the models of a worker, and whose Ops share its pass.

Doorbells come in the order of the calls, so a model with ten calls would be served ten times before one that called
just behind it, and a project with ten models ten times as often as one with a single one. Turns go round instead: the
project that had the least of the time, by its weight, is served first (workers/shares.py), and of its models the one
that waited longest for a turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from app.domain.ops import FORWARD, FORWARD_BACKWARD, OptimStep
from app.stores.interfaces import Entry, Head, OpLog
from workers.ahead import Ahead
from workers.owner import Owner, Resident
from workers.shares import Shares
from workers.unowned import Unowned

# A token's id, target, and weight as the journal holds them; a policy loss has more, and so counts for more.
_TOKEN_BYTES = 16
# A client that was answered sends its next call within milliseconds; what was quiet for longer is not waited for.
_LATELY_S = 1.0
# Of the last pass's time: who comes too late costs a pass of its own. Eight SDK clients of one process need some 150 ms
# to send their calls; with SmolLM2-135M on two cores a pass over 8 x 64 tokens takes 1.2 s.
_WORTH_WAITING = 0.2
_PASSES = (FORWARD, FORWARD_BACKWARD)
_LOOK_AGAIN_S = 0.001


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
