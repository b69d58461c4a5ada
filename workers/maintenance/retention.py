"""Deletes the surplus checkpoints of projects with `keep_checkpoints`: of each kind, a run keeps its newest ones.

A published checkpoint stays and does not count, and neither does one whose owner chose its TTL (Checkpoint.counts). A
round decides by the records alone, so it may be repeated at any time. Deleting is one step that does nothing if a
checkpoint has changed since it was read; the next round decides anew. The files become orphans (orphans.py), so calls
that load them still find them.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from app.domain.checkpoints import CheckpointPrefix
from app.domain.records import Checkpoint
from app.services.admission import LimitsOf
from app.services.tenants import audit
from app.stores.redis.records import RedisRecords, Stored, load
from app.stores.redis.types import Record

log = logging.getLogger(__name__)
_PERIOD_S = 60.0
# A round reads every checkpoint, ten thousand in 0.65 s. It takes a fiftieth of the time at most.
_PAUSES = 50
# One script deletes so many in 1.5 ms, and everybody else waits for the server meanwhile.
_DELETED_AT_ONCE = 100

Counted = tuple[CheckpointPrefix, Stored]


class Retention:
    """The maintenance task. It may run twice at once."""

    def __init__(self, records: RedisRecords, limits: LimitsOf) -> None:
        self._records, self._limits = records, limits
        self._next = 0.0

    def sweep(self) -> None:
        """Runs one round, if it is due."""
        started = time.monotonic()
        if started < self._next:
            return
        for project, most, found in self._runs():
            self._delete(project, found[:most], found[most:])
        self._next = time.monotonic() + max(_PERIOD_S, _PAUSES * (time.monotonic() - started))

    def _runs(self) -> Iterator[tuple[str, int, Sequence[Stored]]]:
        """For each kind of each run: its project, how many checkpoints it keeps, and those that count, newest first."""
        runs: defaultdict[tuple[str, str, str], list[Counted]] = defaultdict(list)
        now = self._records.now()
        for path, fields in self._records.list(Checkpoint.namespace):
            checkpoint = load(Checkpoint, fields)
            place = CheckpointPrefix.parse(checkpoint.prefix)
            if place and checkpoint.counts and not checkpoint.is_expired(now):
                runs[checkpoint.owner, place.model_id, place.kind].append((place, (path, fields)))
        for (project, _, _), counted in runs.items():
            most = self._limits.project(project).keep_checkpoints
            if most is not None and len(counted) > most:
                yield project, most, _newest_first(counted)

    def _delete(self, project: str, newer: Sequence[Stored], older: Sequence[Stored]) -> None:
        for start in range(0, len(older), _DELETED_AT_ONCE):
            surplus = older[start : start + _DELETED_AT_ONCE]
            entries = {path: _entry(project, path, fields, len(newer)) for path, fields in surplus}
            if self._records.delete_older(project, newer, surplus, entries):
                log.info("deleted %d checkpoints behind the newest %d of their run", len(surplus), len(newer))


def _newest_first(counted: Iterable[Counted]) -> list[Stored]:
    ordered = sorted(counted, key=lambda one: (one[0].epoch, one[0].seq), reverse=True)
    return [stored for _, stored in ordered]


def _entry(project: str, path: str, fields: Record, most: int) -> str:
    about: audit.About = {"model_id": load(Checkpoint, fields).model_id, "tinker_path": path, "keep_checkpoints": most}
    return audit.entry(None, project, "checkpoint_expire", about)
