"""Reading a checkpoint's objects: what was cut short on its way is asked for again, what is wrong twice is damaged."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

from app.domain.checkpoints import FileEntry, Manifest
from app.errors import ServerOpError, Unavailable
from app.stores.interfaces import ObjectStore

_TRIES = 4
_PAUSE_S = 0.1
# A store that needs this long for its answers is away for longer; who asked puts the Op off and comes back.
_WITHIN_S = 10.0


def fetch_file(store: ObjectStore, key: str, target: Path, expected: FileEntry) -> None:
    """Raises NotFound, Unavailable when it does not come whole, ServerOpError when it is damaged: whole, but wrong."""
    failure, wrong = Unavailable(), 0
    for _ in _tries():
        try:
            store.get(key, target)
        except Unavailable as error:
            failure = error
            continue
        found = file_entry(target)
        if found == expected:
            return
        wrong += found.size == expected.size
        if wrong == 2:
            raise ServerOpError(
                f"checkpoint file {key} is damaged: it has sha256 {found.sha256}, not {expected.sha256}; restore it in "
                "the object store or use another checkpoint"
            )
        failure = Unavailable(f"{key} came with {found.size} of {expected.size} bytes")
    raise failure


def read_manifest(store: ObjectStore, key: str) -> Manifest:
    """Raises NotFound, Unavailable, and ServerOpError when it cannot be understood however often it is read."""
    failure: Unavailable | ServerOpError = Unavailable()
    for _ in _tries():
        try:
            return parse_manifest(store.read(key), key)
        except (Unavailable, ServerOpError) as error:
            failure = error
    raise failure


def parse_manifest(data: bytes, name: str) -> Manifest:
    """Raises ServerOpError when it cannot be understood."""
    try:
        return Manifest.from_json(data)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ServerOpError(f"the manifest {name} cannot be understood: {error}") from None


def file_entry(file: Path) -> FileEntry:
    with file.open("rb") as data:
        digest = hashlib.file_digest(data, "sha256").hexdigest()
    return FileEntry(file.stat().st_size, digest)


def _tries() -> Iterator[None]:
    started = time.monotonic()
    for attempt in range(_TRIES):
        if attempt and time.monotonic() - started > _WITHIN_S:
            return
        time.sleep(_PAUSE_S * attempt)
        yield
