"""What of a checkpoint may change after it was saved: small objects beside it, as its manifest never changes. Only
`tinsmith rebuild` reads them; the state server's record is what counts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal

from app.stores.interfaces import ObjectStore

Field = Literal["expires_at", "public"]
_NAMES: dict[Field, str] = {"expires_at": "expiry-", "public": "public-"}


def note(store: ObjectStore, prefix: str, field: Field, now: float, value: Any) -> None:
    """`now` is a unix time in seconds; of several notes of a field the latest counts."""
    store.put_new(f"{prefix}/{_NAMES[field]}{int(now * 1e6):020d}.json", json.dumps({field: value}).encode())


def read_note(store: ObjectStore, keys: Iterable[str], field: Field, saved_with: Any) -> Any:
    """The newest value among a checkpoint's keys, else what it was saved with."""
    notes = [key for key in keys if key.rpartition("/")[2].startswith(_NAMES[field])]
    return json.loads(store.read(max(notes)))[field] if notes else saved_with
