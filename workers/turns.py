"""Whose Op runs next among the models of a worker, and whose Ops share its pass.

Doorbells come in the order of the calls, so a model with ten calls would be served ten times before one that called
just behind it. Turns go round instead: what waited longest for one is served first.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

from app.domain.ops import FORWARD, FORWARD_BACKWARD, OptimStep
from app.stores.interfaces import Head, OpLog
from workers.owner import Owner, Resident

# A token's id, target, and weight as the journal holds them; a policy loss has more, and so counts for more.
_TOKEN_BYTES = 16
# A client that was answered sends its next call within milliseconds; what was quiet for longer is not waited for.
_LATELY_S = 1.0
_LOOK_AGAIN_S = 0.001


class Turns:
    """Others may add `merged_tokens` to a pass; with 0 every Op has one of its own, and its bits depend on no other.

    A pass waits up to `wait_s` for the next Ops of models that were served lately: several clients in step would else
    take turns for ever, each just missing the other's pass.
    """

    def __init__(self, oplog: OpLog, owner: Owner, merged_tokens: int, wait_s: float) -> None:
        self._oplog, self._owner = oplog, owner
        self._most_bytes, self._wait_s = merged_tokens * _TOKEN_BYTES, wait_s

    def waiting(self) -> list[Head]:
        """What waits next in the models held here, longest without a turn first; not looked up for a single one."""
        residents = self._owner.residents()
        if len(residents) < 2:
            return []
        heads = self._oplog.heads({model_id: one.applied + 1 for model_id, one in residents.items()})
        return sorted(heads, key=lambda head: residents[head.model_id].served)

    def before(self, asked: Resident, waiting: Sequence[Head], served: Collection[str]) -> Head | None:
        """What has to run before the next Op of `asked`, except of the models `served` already; None when it is its
        turn.

        An optim_step is let in before a shared pass, since the next batch behind it may then join. An Op that broke a
        worker waits for its own doorbell.
        """
        residents = self._owner.residents()
        mine = _of(asked, waiting)
        for head in waiting:
            if head.fresh and head is not mine and head.model_id not in served:
                is_longer = residents[head.model_id].served < asked.served
                if is_longer or (head.kind == OptimStep.kind and self._shares(mine)):
                    return head
        return None

    def company(self, asked: Resident, waiting: Sequence[Head]) -> list[Head]:
        """The Ops of others to share the pass of the next one of `asked`. One that broke a worker before runs alone."""
        mine = _of(asked, waiting)
        if mine is None or not self._shares(mine):
            return []
        return list(self._within_budget(head for head in self._gathered(waiting) if _can_join(head, mine)))

    def _shares(self, head: Head | None) -> bool:
        return bool(self._most_bytes and head and head.fresh and head.kind in (FORWARD, FORWARD_BACKWARD))

    def _gathered(self, waiting: Sequence[Head]) -> Sequence[Head]:
        deadline = time.monotonic() + self._wait_s
        while self._is_one_missing(waiting) and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN_S)
            waiting = self.waiting()
        return waiting

    def _is_one_missing(self, waiting: Sequence[Head]) -> bool:
        here = {head.model_id for head in waiting}
        since = time.monotonic() - _LATELY_S
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
    return head.kind == mine.kind and head.fresh and head.model_id != mine.model_id
