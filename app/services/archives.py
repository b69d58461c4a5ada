"""A checkpoint's files as one tar, for SDKs up to 0.34. Archives are made while they are sent, and never read here."""

from __future__ import annotations

import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app import ids
from app.domain.checkpoints import MANIFEST, Manifest
from app.domain.identity import Caller
from app.errors import NotFound, Unavailable
from app.services.ownership import load_checkpoint
from app.signing import UrlSigner
from app.stores.interfaces import ObjectStore, Records

URL_SECONDS = 3600
COMPLETE = "checkpoint_complete"
"""An empty file at the end: `tinker checkpoint push-hf` takes an archive without it for one that was cut short."""
_CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Archive:
    """`size` bytes, as `chunks` gives them. Raises NotFound or Unavailable midway when a file cannot be had, so that
    fewer come."""

    size: int
    chunks: Iterator[bytes]


class ArchiveService:
    """The URL names the files' folder in the object store, which never changes, so an archive is of the version that
    was asked for, however late it is fetched."""

    def __init__(self, store: Records, objects: ObjectStore, signer: UrlSigner) -> None:
        self._records, self._objects, self._signer = store, objects, signer

    def url(self, path: ids.TinkerPath, caller: Caller) -> tuple[str, int]:
        """A URL that needs no key, and when it expires (unix s). Raises NotFound."""
        checkpoint = load_checkpoint(self._records, path, caller)
        expires = int(time.time()) + URL_SECONDS
        return self._signer.url(_route(checkpoint.prefix), expires), expires

    def open(self, prefix: str, expires: int, signature: str) -> Archive:
        """Raises Forbidden for a URL that is not one of ours, or has expired; NotFound, Unavailable."""
        self._signer.check(_route(prefix), expires, signature)
        try:
            manifest = Manifest.from_json(self._objects.read(f"{prefix}/{MANIFEST}"))
        except NotFound:
            raise NotFound("this checkpoint was deleted") from None
        except (ValueError, TypeError, KeyError, AttributeError):
            raise Unavailable(f"the manifest of {prefix} is damaged: restore it in the object store") from None
        sizes = {name: entry.size for name, entry in manifest.files.items()}
        padded = (_padded(size) for size in sizes.values())
        size = len(_header(COMPLETE, 0)) + len(_END) + sum(padded) + sum(len(_header(*file)) for file in sizes.items())
        return Archive(size, self._chunks(prefix, sizes))

    def _chunks(self, prefix: str, sizes: dict[str, int]) -> Iterator[bytes]:
        with tempfile.TemporaryDirectory(prefix="tinsmith-archive-") as folder:
            for name, size in sizes.items():
                fetched = Path(folder) / "file"
                self._objects.get(f"{prefix}/{name}", fetched)
                if fetched.stat().st_size != size:
                    raise Unavailable(f"{name} of {prefix} came with {fetched.stat().st_size} of {size} bytes")
                yield _header(name, size)
                with fetched.open("rb") as data:
                    yield from iter(lambda: data.read(_CHUNK_BYTES), b"")
                yield bytes(_padded(size) - size)
        yield _header(COMPLETE, 0)
        yield _END


def _route(prefix: str) -> str:
    return f"archives/{prefix}"


_END = bytes(2 * tarfile.BLOCKSIZE)


def _header(name: str, size: int) -> bytes:
    """Only a name and a size; GNU's form holds any size."""
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT)


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
