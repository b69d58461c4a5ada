"""Routes of sampled sequences in the object store, `routes/<day>/<sequence id>@<attempt>`, for one to two days.

The day is that of the state server's clock, so the files of a day are removed together. Each attempt at a sample has
files of its own. The commit of the sample's result names the attempt that counts (RedisFutures.finish_sample), so a
worker that lost its request changes nothing. An earlier version wrote `routes/<day>/<sequence id>`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.domain.routes import SequenceRoutes
from app.errors import NotFound
from app.stores.objects.base import ObjectStore

ROOT = "routes"
DAY_S = 86_400
LONGEST_S = 2 * DAY_S


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a sample: `day` since 1970, and a unique id."""

    day: int
    id: str


@dataclass(frozen=True, slots=True)
class StoredRoutes:
    """The files that an attempt stored, and their bytes together."""

    attempt: Attempt
    keys: Sequence[str]
    size: int


class RouteFiles:
    """Writes, finds and removes routes. `now` is the state server's time, in unix seconds. Every method raises
    Unavailable while the object store is away."""

    def __init__(self, objects: ObjectStore, now: Callable[[], float]) -> None:
        self._objects, self._now = objects, now

    def add(self, routes: dict[str, SequenceRoutes]) -> StoredRoutes:
        """Stores the routes of one attempt at a sample, by sequence id. They count once the sample's commit names the
        attempt."""
        attempt = Attempt(self._today(), uuid.uuid4().hex)
        contents = {_key(attempt, sequence_id): found.encode() for sequence_id, found in routes.items()}
        for key, content in contents.items():
            self._objects.put_new(key, content)
        return StoredRoutes(attempt, tuple(contents), sum(map(len, contents.values())))

    def remove(self, stored: StoredRoutes) -> None:
        """Removes the routes of an attempt that was not committed."""
        self._objects.delete(stored.keys)

    def find(self, sequence_id: str, attempt: Attempt | None) -> SequenceRoutes:
        """The routes of a sequence, of the attempt that its commit names. Without one they are of an earlier version.
        Raises NotFound."""
        yesterday = self._today() - 1
        if attempt is None:
            return self._find_earlier(sequence_id, yesterday)
        if attempt.day < yesterday:
            raise NotFound(f"the routes of {sequence_id!r} are too old")
        return SequenceRoutes.decode(self._objects.read(_key(attempt, sequence_id)))

    def _find_earlier(self, sequence_id: str, yesterday: int) -> SequenceRoutes:
        try:
            return SequenceRoutes.decode(self._objects.read(f"{ROOT}/{yesterday + 1}/{sequence_id}"))
        except NotFound:
            return SequenceRoutes.decode(self._objects.read(f"{ROOT}/{yesterday}/{sequence_id}"))

    def remove_old(self) -> int:
        """Removes the routes of the days before yesterday. Returns yesterday's number."""
        yesterday = self._today() - 1
        self._objects.delete(key for key in self._objects.list(f"{ROOT}/") if _is_before(key, yesterday))
        return yesterday

    def _today(self) -> int:
        return int(self._now()) // DAY_S


def _key(attempt: Attempt, sequence_id: str) -> str:
    return f"{ROOT}/{attempt.day}/{sequence_id}@{attempt.id}"


def _is_before(key: str, day: int) -> bool:
    """True for a key of an earlier day. A foreign file, such as `routes/Thumbs.db`, has no day."""
    found = key.split("/")[1]
    return found.isdecimal() and int(found) < day
