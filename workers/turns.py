"""Whose Op runs next among the models of a worker, and whose Ops share its pass.

Doorbells come in the order of the calls, so a model with ten calls would be served ten times before one that called
just behind it. Turns go round instead: what waited longest for one is served first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from app.domain.ops import FORWARD, FORWARD_BACKWARD
from app.stores.interfaces import Head, OpLog
from workers.owner import Owner, Resident

# A token's id, target, and weight as the journal holds them; a policy loss has more, and so counts for more.
_TOKEN_BYTES = 16


class Turns:
    """Others may add `merged_tokens` to a pass; with 0 every Op has one of its own, and its bits depend on no other."""

    def __init__(self, oplog: OpLog, owner: Owner, merged_tokens: int) -> None:
        self._oplog, self._owner = oplog, owner
        self._most_bytes = merged_tokens * _TOKEN_BYTES

    def waiting(self) -> list[Head]:
        """What waits next in the models held here, longest without a turn first; not looked up for a single one."""
        residents = self._owner.residents()
        if len(residents) < 2:
            return []
        heads = self._oplog.heads({model_id: one.applied + 1 for model_id, one in residents.items()})
        return sorted(heads, key=lambda head: residents[head.model_id].served)

    def before(self, asked: Resident, waiting: Sequence[Head]) -> Head | None:
        """What has to run before the next Op of `asked`. One that broke a worker waits for its own doorbell."""
        residents = self._owner.residents()
        longest = next((head for head in waiting if head.fresh), None)
        return longest if longest and residents[longest.model_id].served < asked.served else None

    def company(self, asked: Resident, waiting: Sequence[Head]) -> list[Head]:
        """The Ops of others to share the pass of the next one of `asked`. One that broke a worker before runs alone."""
        mine = next((head for head in waiting if head.model_id == asked.lease.model_id), None)
        if mine is None or mine.kind not in (FORWARD, FORWARD_BACKWARD) or not mine.fresh:
            return []
        return list(self._within_budget([head for head in waiting if head.kind == mine.kind and head != mine]))

    def _within_budget(self, heads: Sequence[Head]) -> Iterator[Head]:
        left = self._most_bytes
        for head in heads:
            if head.fresh and 0 < head.size <= left:
                left -= head.size
                yield head
