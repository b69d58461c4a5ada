"""Doorbells that were turned away: at a gap in the journal, or because the object store is away."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from app import ids

_FIRST_S, _LONGEST_S = 2.0, 60.0


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
        self._pauses.setdefault(model_id, _Pause(time.monotonic() + _FIRST_S, _FIRST_S))

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
                longer = min(2 * pause.seconds, _LONGEST_S)
                self._pauses[model_id] = _Pause(now + longer, longer)
                seq = min(self._kinds[model_id])
                self._ring_for(model_id, seq, self._kinds[model_id][seq])

    def _ring_for(self, model_id: str, seq: int, kind: str) -> None:
        self._ring(kind, ids.request_id(model_id, seq), model_id, self._queue)
