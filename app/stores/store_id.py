"""The check at a start that the object store is the one whose files the state server records.

A disk that is not mounted looks like an empty store. Calls would then fail for good, as if their files had been
deleted. So the store has an object with a random id, and the state server keeps the same id.
"""

from __future__ import annotations

import json
import logging
import uuid

import redis

from app.domain.checkpoints import MODELS
from app.domain.records import Checkpoint, Model
from app.errors import NotFound, SetupError, Unavailable
from app.settings import Settings
from app.stack.redaction import without_secrets
from app.stores.objects import name_of
from app.stores.objects.base import ObjectStore
from app.stores.redis.records import RedisRecords

log = logging.getLogger(__name__)
STORE_ID = "store-id"
_RECORD = ("object_store", "id")


def check_store_id(settings: Settings, records: RedisRecords, objects: ObjectStore) -> None:
    """Raises SetupError when the store has not the id that the state server keeps. A state server without an id takes
    that of the store, which gets one if it has none.

    A server that is away is no error and leaves the check to the next process that starts.
    """
    try:
        known, found = _known(records), _found(objects)
        if known is None:
            found = found or _new(settings, records, objects)
            records.put_new(*_RECORD, {"id": json.dumps(found)})
            known = _known(records)  # another process may have been first
    except (redis.RedisError, OSError, Unavailable, NotFound) as error:
        log.warning("the id of the object store was not checked: %s", error)
        return
    if found != known:
        raise _wrong(settings)


def _known(records: RedisRecords) -> str | None:
    record = records.get(*_RECORD)
    return str(json.loads(record["id"])) if record else None


def _found(objects: ObjectStore) -> str | None:
    try:
        return objects.read(STORE_ID).decode(errors="replace")
    except NotFound:
        return None


def _new(settings: Settings, records: RedisRecords, objects: ObjectStore) -> str:
    """The id of a store that had none: ours, or that of another process. Raises SetupError when the state server has
    checkpoints or snapshots, as one of an earlier version may, and the store has not."""
    if _has_files(records) and not objects.page(f"{MODELS}/", "", 1):
        raise _wrong(settings)
    objects.put_new(STORE_ID, uuid.uuid4().hex.encode())
    return objects.read(STORE_ID).decode()


def _has_files(records: RedisRecords) -> bool:
    """True if a checkpoint or a run's snapshot is recorded."""
    runs = (fields for _, fields in records.list(Model.namespace))
    return any(records.list(Checkpoint.namespace)) or any(fields.get("snapshot") for fields in runs)


def _wrong(settings: Settings) -> SetupError:
    return SetupError(
        f"the object store {name_of(settings)} is not the one of the state server {without_secrets(settings.redis.url)}"
        f": its object {STORE_ID!r} is missing or another one. If it is the wrong one, mount its disk or correct "
        f"store.url. If it is to be the new one, copy all objects of the former one to it, {STORE_ID} too. If those "
        "are lost, start with an empty state server and bring back what is left: `tinsmith rebuild`, `tinsmith restore`"
    )
