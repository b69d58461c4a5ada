"""What there is to do and who does it, looked up for everybody at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from app.domain.records import Worker
from app.services.standings import Standings
from app.stores.interfaces import Backlog, Unfinished

# With so many waiting a look takes some 50 ms, most of them here; who stands behind that is told no place.
_MOST = 10_000


class Workers(Protocol):
    def workers(self) -> dict[str, Worker]:
        """Those that beat now and do what they are asked, by node."""
        ...


class Rooms(Protocol):
    def shortage(self) -> str:
        """Why no call is taken in at present; empty while there is room."""
        ...


@dataclass(frozen=True, slots=True)
class Look:
    """`live`: (role, base model) of the workers that are there. `shortage`: why no call is taken in; empty if it is."""

    live: frozenset[tuple[str, str]]
    shortage: str
    unfinished: Unfinished
    standings: Standings = field(repr=False)


class QueueLooks:
    """One look serves all who ask within a moment: 2,000 held polls may end within seconds. `weight_of` a project."""

    def __init__(self, workers: Workers, rooms: Rooms, backlog: Backlog, weight_of: Callable[[str], float]) -> None:
        self._workers, self._rooms, self._backlog, self._weight_of = workers, rooms, backlog, weight_of
        self._lock = threading.Lock()
        self._looked = float("-inf")
        self._newest: Look | None = None

    def newest(self, age_s: float) -> Look | None:
        """One that is about `age_s` old at most; None while none ever succeeded."""
        with self._lock:
            if time.monotonic() - self._looked > age_s:
                # Noted first: in an outage one caller in a while finds out, and not one behind the other.
                self._looked = time.monotonic()
                self._newest = self._look()
            return self._newest

    def _look(self) -> Look:
        workers, unfinished = self._workers.workers(), self._backlog.unfinished(_MOST)
        live = frozenset((worker.role, worker.base_model) for worker in workers.values())
        return Look(live, self._rooms.shortage(), unfinished, Standings(unfinished, workers, self._weight_of))
