"""The ObjectStore protocol, the keys that all stores allow, and local files: their entries and atomic writes.

Every store allows the same keys, so that a move from a folder to S3 never fails on a name.

A local file appears whole or not at all, and survives a power cut.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from app.domain.checkpoints import FileEntry
from app.errors import BadRequest, TooLarge

# S3 allows 1,024 bytes; the difference is left for the store's own folder.
_LONGEST = 900
# A leading dot is refused, which covers "." and ".." and keeps the folder store's own files out of reach.
_PART = r"[A-Za-z0-9_:=@+-][A-Za-z0-9_:=@+.-]{0,254}"
_KEY = re.compile(rf"{_PART}(?:/{_PART})*")


class ObjectStore(Protocol):
    """Immutable files by key. A key appears whole or not at all; there is no rename and no append."""

    def put_new(self, key: str, source: Path | bytes) -> bool:
        """Stores a file; False (nothing changes) when the key exists."""
        ...

    def copy(self, source: str, target: str) -> None:
        """Gives an object a second key, without its bytes passing through this process. Raises NotFound.

        Nothing else is ever stored under `target`. Each key is deleted by itself. A repeat changes nothing.
        """
        ...

    def get(self, key: str, target: Path, most_bytes: int | None = None) -> None:
        """Fetches an object to a local file, whole or not at all. Raises NotFound, and TooLarge for an object of more
        than `most_bytes`: no more than these are written."""
        ...

    def entry(self, key: str) -> FileEntry:
        """The size and sha256 of an object, which takes no room on a disk. Raises NotFound."""
        ...

    def read(self, key: str) -> bytes:
        """The bytes of a small object. Raises NotFound."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Keys that start with `prefix`, sorted. A foreign file with a name that is no key is left out."""
        ...

    def page(self, prefix: str, after: str, limit: int) -> Sequence[str]:
        """The first `limit` of these keys that come behind `after`: a key, or another text that is no folder of keys.
        An S3 server sends no others."""
        ...

    def folders(self, prefix: str) -> Sequence[str]:
        """The next part of the keys that start with `prefix` and have a further one, sorted; `prefix` ends with "/". A
        part whose keys were all deleted may be among them."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects. A missing key is no error."""
        ...

    def size(self, key: str) -> int:
        """The bytes of an object. Raises NotFound."""
        ...

    def presign(self, key: str, expires_s: int) -> str:
        """A URL that needs no credentials and stops working after `expires_s` seconds."""
        ...

    def presign_put(self, key: str, expires_s: int, most_bytes: int) -> str:
        """A URL to which anyone may send the object with one HTTP PUT, for `expires_s` seconds. It may replace an
        object, unlike `put_new`. A folder refuses more than `most_bytes`; an S3 server stores them."""
        ...


def is_key(name: str) -> bool:
    """True if an object can have this name. A disk or another program may leave files with other names in a store."""
    return len(name) <= _LONGEST and _KEY.fullmatch(name) is not None


def check_key(key: str) -> str:
    """The key, unchanged. Raises BadRequest when a part is empty, starts with a dot or holds another character."""
    if is_key(key):
        return key
    raise BadRequest(
        f"{key[:200]!r} is not an object key: use up to {_LONGEST} characters in parts joined by '/', "
        "each of letters, digits and _:=@+-. and not starting with '.'"
    )


def check_prefix(prefix: str) -> str:
    """The prefix, unchanged. Raises BadRequest when no key could start with it. An empty prefix means every key."""
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix


def file_entry(file: Path, *, hashed: bool = True) -> FileEntry:
    """A local file's entry in its checkpoint's manifest. The sha256 is empty unless `hashed`."""
    if not hashed:
        return FileEntry(file.stat().st_size, "")
    with file.open("rb") as data:
        digest = hashlib.file_digest(data, "sha256").hexdigest()
    return FileEntry(file.stat().st_size, digest)


def copy_bounded(pieces: Iterable[bytes], file: BinaryIO, most_bytes: int | None) -> None:
    """Writes the pieces to a file. Raises TooLarge before more than `most_bytes` are written."""
    left = most_bytes
    for piece in pieces:
        if left is not None:
            left -= len(piece)
            if left < 0:
                raise TooLarge(f"the object has more than {most_bytes} bytes")
        file.write(piece)


def reader(source: Path | bytes) -> BinaryIO:
    """The content of a file, or these bytes, open for reading."""
    return io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")


@contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """A file to write. It replaces `target`, on disk, when the block ends without an error; else `target` stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary_file(target.parent) as (file, path):
        yield file
        flush(file)
        path.replace(target)
        flush_folder(target.parent)


@contextmanager
def temporary_file(folder: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A new file in `folder` with a unique name. It is deleted at the end unless it was renamed."""
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
    """Makes the names in `folder` durable; without this call a new file can vanish in a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
