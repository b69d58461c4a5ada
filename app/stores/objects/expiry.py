"""When a checkpoint expires, if that was changed after it was saved: a small object beside it, as its manifest never
changes. Only `tinsmith rebuild` reads it; the state server's record is what counts."""

from __future__ import annotations

import json
from collections.abc import Iterable

from app.stores.interfaces import ObjectStore

_NAME = "expiry-"


def note_expiry(store: ObjectStore, prefix: str, now: float, expires_at: float | None) -> None:
    """`now` and `expires_at` are unix times in seconds; None keeps the checkpoint for ever."""
    store.put_new(f"{prefix}/{_NAME}{int(now * 1e6):020d}.json", json.dumps({"expires_at": expires_at}).encode())


def read_expiry(store: ObjectStore, keys: Iterable[str], saved_with: float | None) -> float | None:
    """The newest note among a checkpoint's keys, else what it was saved with."""
    notes = [key for key in keys if key.rpartition("/")[2].startswith(_NAME)]
    if not notes:
        return saved_with
    expires_at: float | None = json.loads(store.read(max(notes)))["expires_at"]
    return expires_at
