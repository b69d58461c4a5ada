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
from collections.abc import Iterable, Mapping, Sequence

from app.domain.checkpoints import CheckpointPrefix
from app.domain.records import Checkpoint
from app.services.tenants import audit
from app.services.tenants.limits import LimitsFinder
from app.stores.redis.client import slices
from app.stores.redis.records import RETAINED, RedisRecords, Stored, load

log = logging.getLogger(__name__)
_PERIOD_S = 60.0
# A round reads every checkpoint, ten thousand in 0.65 s. It takes a fiftieth of the time at most.
_PAUSES = 50
# One script deletes so many in 1.5 ms, and everybody else waits for the server meanwhile.
_DELETED_AT_ONCE = 100

Run = tuple[str, str, str]
"""Project, model id and kind of checkpoints."""
Counted = tuple[int, int, Stored]
"""Epoch and seq of a checkpoint, its path and RETAINED fields: a round has all that count in memory."""


class Retention:
    """The maintenance task. It may run twice at once."""

    def __init__(self, records: RedisRecords, limits: LimitsFinder) -> None:
        self._records, self._limits = records, limits
        self._next = 0.0

    def sweep(self) -> None:
        """Runs one round, if it is due."""
        started = time.monotonic()
        if started < self._next:
            return
        try:
            if self._limits.may_have("keep_checkpoints"):
                self._run_round()
        finally:
            self._next = time.monotonic() + max(_PERIOD_S, _PAUSES * (time.monotonic() - started))

    def _run_round(self) -> None:
        unreadable: set[str] = set()
        for (project, model_id, _), counted in self._runs(unreadable).items():
            most = self._number(project, unreadable)
            if most is not None and len(counted) > most:
                found = _newest_first(counted)
                self._delete(project, model_id, found[:most], found[most:])
        if unreadable:
            log.warning(
                "%d checkpoints or projects cannot be read and keep everything; one is %s",
                len(unreadable),
                min(unreadable),
            )

    def _runs(self, unreadable: set[str]) -> Mapping[Run, Sequence[Counted]]:
        """The checkpoints that count, of each kind of each run. Adds the paths of those that cannot be read to
        `unreadable`."""
        runs: defaultdict[Run, list[Counted]] = defaultdict(list)
        now = self._records.now()
        for path, fields in self._records.list(Checkpoint.namespace):
            try:
                checkpoint = load(Checkpoint, fields)
                place = CheckpointPrefix.parse(checkpoint.prefix)
                if place and checkpoint.counts and not checkpoint.is_expired(now):
                    stored = path, {name: fields[name] for name in RETAINED if name in fields}
                    runs[checkpoint.owner, place.model_id, place.kind].append((place.epoch, place.seq, stored))
            except (TypeError, ValueError):
                unreadable.add(path)
        return runs

    def _number(self, project: str, unreadable: set[str]) -> int | None:
        """The project's keep_checkpoints. A project whose limits cannot be read keeps all, and is added to
        `unreadable`."""
        if project in unreadable:
            return None
        try:
            return self._limits.project(project).keep_checkpoints
        except (TypeError, ValueError):
            unreadable.add(project)
            return None

    def _delete(self, project: str, model_id: str, newer: Sequence[Stored], older: Sequence[Stored]) -> None:
        for surplus in slices(older, _DELETED_AT_ONCE):
            entries = {path: _entry(project, model_id, path, len(newer)) for path, _ in surplus}
            if self._records.delete_older(project, newer, surplus, entries):
                log.info("deleted %d checkpoints behind the newest %d of their run", len(surplus), len(newer))


def _newest_first(counted: Iterable[Counted]) -> list[Stored]:
    ordered = sorted(counted, key=lambda one: one[:2], reverse=True)
    return [stored for _, _, stored in ordered]


def _entry(project: str, model_id: str, path: str, most: int) -> str:
    about: audit.About = {"model_id": model_id, "tinker_path": path, "keep_checkpoints": most}
    return audit.entry(None, project, "checkpoint_expire", about)
