"""Lists of checkpoints, newest first and without the expired ones, each by an index: no other checkpoint is read."""

from __future__ import annotations

from collections.abc import Iterable, Set

from app import ids
from app.domain import records
from app.domain.accounts import Caller
from app.domain.records import Checkpoint
from app.services.tenants.access import may_read
from app.stores.redis.records import RedisRecords
from app.stores.redis.types import Record

Found = tuple[str, Checkpoint]
"""A checkpoint's path and the checkpoint."""


def of_run(store: RedisRecords, model_id: str, caller: Caller) -> list[Found]:
    """A run's checkpoints that the caller may read; of another project's run these are the public ones."""
    found = _newest_first(store, store.list(Checkpoint.namespace, ids.checkpoint_prefix(model_id)))
    return [(path, one) for path, one in found if may_read(caller, one)]


def of_projects(store: RedisRecords, projects: Set[str]) -> list[Found]:
    """The checkpoints of all runs in the projects."""
    return _newest_first(store, store.list_checkpoints(projects).items())


def _newest_first(store: RedisRecords, stored: Iterable[tuple[str, Record]]) -> list[Found]:
    now = store.now()
    loaded = ((path, records.load(Checkpoint, fields)) for path, fields in stored)
    found = [(path, one) for path, one in loaded if not one.is_expired(now)]
    return sorted(found, key=lambda pair: (-pair[1].created, pair[0]))
