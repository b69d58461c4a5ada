"""Taking a checkpoint's files away."""

from __future__ import annotations

from app.domain.checkpoints import MANIFEST
from app.stores.interfaces import ObjectStore


def remove_checkpoint(store: ObjectStore, prefix: str) -> None:
    """Remove everything below `prefix`, the manifest first, so that what is there is never seen half."""
    keys = store.list(f"{prefix}/")
    store.delete(sorted(keys, key=lambda key: not key.endswith(f"/{MANIFEST}")))
