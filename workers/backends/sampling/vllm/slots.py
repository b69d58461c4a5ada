"""Slots of an engine that does not preempt one sequence for another: each sequence waits here until it may begin.

vLLM begins sequences in the order in which it receives them, and preempts only when its cache is full, not when all of
its `max_num_seqs` are taken. So it receives no more than it decodes at once. The next free slot goes to the project
that has the fewest for its weight. A few slots are in reserve for projects below their share, so that a short request
does not wait until one of a long request's sequences ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from workers.backends.sampling.base import RequestHandle
from workers.backends.sampling.shares import shares

# One slot in reserve for this many slots.
_RESERVE = 8


def with_reserve(slots: int) -> int:
    """Returns the number of sequences that the engine must be able to decode at once."""
    return slots + max(1, slots // _RESERVE)


def without_reserve(sequences: int) -> int:
    """Returns the number of slots for an engine that decodes this number of sequences at once."""
    return max(1, sequences - max(1, sequences // (_RESERVE + 1)))


class SequenceSlots:
    """Slots for sequences. Used only in the engine's loop."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._running = Counter[str]()
        self._weights: dict[str, float] = {}
        self._waiting: dict[str, deque[asyncio.Event]] = {}

    @asynccontextmanager
    async def slot(self, handle: RequestHandle) -> AsyncIterator[None]:
        """Waits for a slot, which lasts as long as the block. If `handle` is aborted while it waits, the block starts
        at once, without a slot."""
        project, turn = handle.project, asyncio.Event()
        loop = asyncio.get_running_loop()
        handle.on_abort(lambda: None if loop.is_closed() else loop.call_soon_threadsafe(turn.set))
        self._weights[project] = handle.weight
        self._waiting.setdefault(project, deque()).append(turn)
        self._admit()
        try:
            await turn.wait()
            yield
        finally:
            if turn in self._waiting.get(project, ()):
                self._remove(project, turn)
            else:
                self._running[project] -= 1
            self._admit()

    def _admit(self) -> None:
        while (project := self._next()) is not None:
            turn = self._waiting[project][0]
            self._remove(project, turn)
            self._running[project] += 1
            turn.set()

    def _next(self) -> str | None:
        """Returns the project that gets the next slot; None if no slot is free for any."""
        self._running = +self._running
        self._weights = {project: self._weights[project] for project in {*self._waiting, *self._running}}
        taken, rank = self._running.total(), {name: self._running[name] / self._weights[name] for name in self._waiting}
        if taken >= self._slots:
            share = shares(self._weights, self._slots)
            rank = {name: has for name, has in rank.items() if self._running[name] < share[name]}
        return min(rank, key=rank.__getitem__) if rank and taken < with_reserve(self._slots) else None

    def _remove(self, project: str, turn: asyncio.Event) -> None:
        self._waiting[project].remove(turn)
        if not self._waiting[project]:
            del self._waiting[project]
