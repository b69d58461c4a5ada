"""Archives of checkpoints in the object store: one tar of a checkpoint's files, for SDKs up to 0.34.

The tar is generated while it is sent, and this server never reads one.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

from app.domain.checkpoints import MANIFEST, Manifest
from app.errors import NotFound, Unavailable
from app.stores.disk import TemporaryCopies
from app.stores.objects.base import ObjectStore

COMPLETE = "checkpoint_complete"
"""An empty file at the end: `tinker checkpoint push-hf` takes an archive without it for one that was cut short."""
_CHUNK_BYTES = 2**20
_END = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive of `size` bytes, produced by `chunks`. `chunks` raises NotFound or Unavailable midway when a file is
    not available, so that fewer bytes come."""

    size: int
    chunks: Iterator[bytes]


class ArchiveFiles:
    """Archives of checkpoints. A file is copied to the disk before it is sent, and `least_free` bytes of the disk stay
    free."""

    def __init__(self, objects: ObjectStore, least_free: int) -> None:
        self._objects = objects
        self._copies = TemporaryCopies(least_free)

    def open(self, prefix: str) -> Archive:
        """The archive of the checkpoint at `prefix`. Raises NotFound, or Unavailable."""
        try:
            manifest = Manifest.from_json(self._objects.read(f"{prefix}/{MANIFEST}"))
        except NotFound:
            raise NotFound("this checkpoint was deleted") from None
        except ValueError:
            raise Unavailable(f"the manifest of {prefix} is damaged: restore it in the object store") from None
        sizes = {name: entry.size for name, entry in manifest.files.items()}
        padded = (_padded(size) for size in sizes.values())
        size = len(_header(COMPLETE, 0)) + len(_END) + sum(padded) + sum(len(_header(*file)) for file in sizes.items())
        chunks = self._chunks(prefix, sizes)
        next(chunks)
        return Archive(size, chunks)

    def _chunks(self, prefix: str, sizes: dict[str, int]) -> Iterator[bytes]:
        """The first chunk is empty. Before it, this raises Unavailable while no archive can be sent; after it, the end
        of the iterator makes room for another archive, also when nothing else was read."""
        with self._copies.folder(max(sizes.values(), default=0)) as folder:
            yield b""
            for name, size in sizes.items():
                fetched = folder / "file"
                self._objects.get(f"{prefix}/{name}", fetched)
                if fetched.stat().st_size != size:
                    raise Unavailable(
                        f"the object store sent {fetched.stat().st_size} of the {size} bytes of {prefix}/{name}; try "
                        "again soon"
                    )
                yield _header(name, size)
                with fetched.open("rb") as data:
                    yield from iter(lambda: data.read(_CHUNK_BYTES), b"")
                yield bytes(_padded(size) - size)
        yield _header(COMPLETE, 0)
        yield _END


def _header(name: str, size: int) -> bytes:
    """A tar header with only a name and a size; GNU's format holds any size."""
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT)


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
