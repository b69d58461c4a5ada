"""Sessions that were given to another project: the manifests of what was saved before say what they did. Only `tinsmith
rebuild` reads these; the state server's records are what counts."""

from __future__ import annotations

import json

from app.stores.interfaces import ObjectStore

_PREFIX = "moves"


def note_move(store: ObjectStore, session_id: str, now: float, project: str) -> None:
    """`now` is a unix time in seconds; of several moves the latest counts."""
    store.put_new(f"{_PREFIX}/{session_id}/{int(now * 1e6):020d}.json", json.dumps({"owner": project}).encode())


def read_moves(store: ObjectStore) -> dict[str, str]:
    """The project of each session that was ever moved."""
    newest = {key.split("/")[1]: key for key in store.list(f"{_PREFIX}/")}  # sorted: the last one stays
    return {session_id: json.loads(store.read(key))["owner"] for session_id, key in newest.items()}
