"""Object stores: their promises, the keys they allow, and local files that appear whole or not at all.

Every store allows the same keys, so that moving from a folder to S3 never fails on a name.

Local files stay after a power cut.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from app.errors import BadRequest

# S3 allows 1,024 bytes; the rest is left for the store's own folder.
_LONGEST = 900
# A leading dot is refused, which covers "." and ".." and keeps the folder store's own files out of reach.
_PART = re.compile(r"[A-Za-z0-9_:=@+-][A-Za-z0-9_:=@+.-]{0,254}")


class ObjectStore(Protocol):
    """Immutable files by key. A key appears whole or not at all; there is no rename and no append."""

    def put_new(self, key: str, source: Path | bytes) -> bool:
        """Store a file; False (nothing changes) when the key exists."""
        ...

    def copy(self, source: str, target: str) -> None:
        """Give an object a second key, under which nothing else is ever stored, without its bytes passing through here;
        each goes by itself. A repeat changes nothing. Raises NotFound."""
        ...

    def get(self, key: str, target: Path) -> None:
        """Fetch to a local file, whole or not at all. Raises NotFound."""
        ...

    def read(self, key: str) -> bytes:
        """A small object's bytes. Raises NotFound."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Keys that start with `prefix`, sorted."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Missing keys are fine."""
        ...

    def presign(self, key: str, expires_s: int) -> str:
        """A URL that needs no key and stops working after `expires_s`."""
        ...


def check_key(key: str) -> str:
    """The key, unchanged. Raises BadRequest when a part is empty, starts with a dot or holds another character."""
    if len(key) <= _LONGEST and all(_PART.fullmatch(part) for part in key.split("/")):
        return key
    raise BadRequest(
        f"{key[:200]!r} is not an object key: use up to {_LONGEST} characters in parts joined by '/', "
        "each of letters, digits and _:=@+-. and not starting with '.'"
    )


def check_prefix(prefix: str) -> str:
    """The prefix, unchanged. Raises BadRequest when no key could start with it; empty means every key."""
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix


@contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """A file to write; `target` is replaced by it, on disk, when the block ends well, and untouched otherwise."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary_file(target.parent) as (file, path):
        yield file
        flush(file)
        path.replace(target)
        flush_folder(target.parent)


@contextmanager
def temporary_file(folder: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A new file in `folder` with a name of its own, gone at the end unless it was renamed."""
    handle, name = tempfile.mkstemp(dir=folder, prefix=".tmp-")
    path = Path(name)
    try:
        with open(handle, "wb") as file:  # noqa: PTH123 (a descriptor, not a path)
            yield file, path
    finally:
        path.unlink(missing_ok=True)


def flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Make the names in `folder` last; without it a new file can vanish with the power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
