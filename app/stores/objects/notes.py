"""Notes on checkpoints and on moved sessions, and the removal of a checkpoint's files.

Only `tinsmith rebuild` reads the notes; in all other cases the state server's records count.

A checkpoint's manifest never changes; small objects beside it, the notes, hold the fields that may change. When a
session moves to another project, its manifests keep the project under which each checkpoint was saved.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from typing import Any, Literal

from app.domain.checkpoints import MANIFEST, CheckpointPrefix
from app.errors import Unavailable
from app.stores.objects.base import ObjectStore

log = logging.getLogger(__name__)

Field = Literal["expires_at", "public"]
_NAMES: dict[Field, str] = {"expires_at": "expiry-", "public": "public-"}

_PREFIX = "moves"
_MOST_EXPIRED = 10
"""Notes of one deletion. A rebuild takes the newest save that is left, so only the first note counts, until the newest
saves are swept while a sampler keeps an older one."""
# Other files there are foreign, such as a `Thumbs.db`.
_MOVE = re.compile(rf"{_PREFIX}/([^/]+)/[0-9]{{20}}\.json")


def note(store: ObjectStore, prefix: str, field: Field, now: float, value: Any) -> None:
    """Stores a field's new value. `now` is a unix time in seconds; of several notes of a field the latest counts."""
    store.put_new(f"{prefix}/{_NAMES[field]}{int(now * 1e6):020d}.json", json.dumps({field: value}).encode())


def end_checkpoint(store: ObjectStore, prefix: str, now: float, *, keep_files: bool) -> None:
    """Removes the files of a deleted checkpoint. With `keep_files` it only notes that the checkpoint has expired, and
    the files become orphans. Either way `tinsmith rebuild` restores neither it nor an older save of its path."""
    if keep_files:
        note(store, prefix, "expires_at", now, now)
    else:
        remove_checkpoint(store, prefix)
    expire_older(store, prefix, now)


def expire_older(store: ObjectStore, prefix: str, now: float) -> None:
    """Notes that the newest saves which the one at `prefix` replaced have expired, so that `tinsmith rebuild` restores
    none in its place. Their files stay for calls that load them. A store that is away or full is only logged."""
    try:
        for place in _older(store, prefix)[:_MOST_EXPIRED]:
            note(store, str(place), "expires_at", now, now)
    except Unavailable as error:
        log.warning("a rebuild may restore a save that the deleted %s replaced: %s", prefix, error)


def _older(store: ObjectStore, prefix: str) -> list[CheckpointPrefix]:
    """The whole saves of the same path that were written before the one at `prefix`, newest first."""
    newest = CheckpointPrefix.parse(prefix)
    manifests = (key for key in store.list(f"{prefix.rpartition('/')[0]}/") if key.endswith(f"/{MANIFEST}"))
    places = (CheckpointPrefix.parse(key) for key in manifests)
    older = [place for place in places if place is not None and newest is not None and place < newest]
    return sorted(older, reverse=True)


def has_note(keys: Iterable[str], field: Field) -> bool:
    """True if a checkpoint's keys have a note of the field."""
    return any(key.rpartition("/")[2].startswith(_NAMES[field]) for key in keys)


def read_note(store: ObjectStore, keys: Iterable[str], field: Field, saved_with: Any) -> Any:
    """The field's newest value among the notes in a checkpoint's keys, else `saved_with`."""
    notes = [key for key in keys if key.rpartition("/")[2].startswith(_NAMES[field])]
    return json.loads(store.read(max(notes)))[field] if notes else saved_with


def note_move(store: ObjectStore, session_id: str, now: float, project: str) -> None:
    """Stores a session's new project. `now` is a unix time in seconds; of several moves the latest counts."""
    store.put_new(f"{_PREFIX}/{session_id}/{int(now * 1e6):020d}.json", json.dumps({"owner": project}).encode())


def read_moves(store: ObjectStore) -> dict[str, str]:
    """The newest project of each session that was ever moved."""
    found = map(_MOVE.fullmatch, store.list(f"{_PREFIX}/"))  # sorted: the last one of a session stays
    newest = {move[1]: move[0] for move in found if move}
    return {session_id: json.loads(store.read(key))["owner"] for session_id, key in newest.items()}


def remove_checkpoint(store: ObjectStore, prefix: str) -> None:
    """Removes everything below `prefix`, the manifest first, so that nobody ever sees half a checkpoint."""
    keys = store.list(f"{prefix}/")
    store.delete(sorted(keys, key=lambda key: not key.endswith(f"/{MANIFEST}")))
