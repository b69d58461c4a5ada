"""The one place where something is loaded for its owner; missing, foreign and expired look alike."""

from __future__ import annotations

from typing import TypeVar

from app.domain import records
from app.domain.records import Checkpoint, Loss, Model, Sampler, Session
from app.errors import NotFound
from app.stores.interfaces import Records

Owned = TypeVar("Owned", Session, Model, Sampler, Checkpoint, Loss)


def load_owned(store: Records, cls: type[Owned], key: str, owner: str) -> Owned:
    """Raises NotFound with a text that depends on nothing but what was asked for."""
    stored = store.get(cls.namespace, key)
    found = records.load(cls, stored) if stored else None
    if found is None or found.owner != owner or _is_expired(found, store):
        raise NotFound(f"{cls.__name__.lower()} {key[:200]!r} does not exist")
    return found


def _is_expired(found: Session | Model | Sampler | Checkpoint | Loss, store: Records) -> bool:
    """Only checkpoints expire, and most do not: only one that may costs asking for the time."""
    return isinstance(found, Checkpoint) and found.expires_at is not None and found.is_expired(store.now())
