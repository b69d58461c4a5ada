"""Routes of sampled sequences in the object store, `routes/<day>/<sequence id>`, for one to two days.

The day is that of the state server's clock, so the files of a day are removed together, and no record of them is kept.
"""

from __future__ import annotations

from collections.abc import Callable

from app.domain.routes import SequenceRoutes
from app.errors import NotFound
from app.stores.objects.base import ObjectStore

ROOT = "routes"
DAY_S = 86_400


class RouteFiles:
    """Writes, finds and removes routes. `now` is the state server's time, in unix seconds. Every method raises
    Unavailable while the object store is away."""

    def __init__(self, objects: ObjectStore, now: Callable[[], float]) -> None:
        self._objects, self._now = objects, now

    def add(self, sequence_id: str, routes: SequenceRoutes) -> None:
        """Stores the routes of a sequence. They replace those of an earlier attempt at the same sample."""
        key, content = _key(self._today(), sequence_id), routes.encode()
        if not self._objects.put_new(key, content):
            self._objects.delete([key])
            self._objects.put_new(key, content)

    def find(self, sequence_id: str) -> SequenceRoutes:
        """The newest routes of a sequence. Raises NotFound."""
        today = self._today()
        try:
            return SequenceRoutes.decode(self._objects.read(_key(today, sequence_id)))
        except NotFound:
            return SequenceRoutes.decode(self._objects.read(_key(today - 1, sequence_id)))

    def remove_old(self) -> None:
        """Removes the routes of the days before yesterday."""
        yesterday = self._today() - 1
        self._objects.delete(key for key in self._objects.list(f"{ROOT}/") if int(key.split("/")[1]) < yesterday)

    def _today(self) -> int:
        return int(self._now()) // DAY_S


def _key(day: int, sequence_id: str) -> str:
    return f"{ROOT}/{day}/{sequence_id}"
