"""Keeps a part of each disk free: a full disk ends the embedded state server, and then each of its restarts.

With less than `engine.free_disk_bytes` free, new calls, files of the object store, saves, snapshots, fetched
checkpoints and copies for downloads stop. The rest is kept for work that must go on, such as the results of admitted
calls, and for deletions.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import IO, BinaryIO

from app.errors import Unavailable

_PIECE = 2**20
_MOST_COPIES = 4


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk under a folder that exists, with the bytes to keep free on it. `name` says which disk it is."""

    name: str
    folder: Path
    least_free: int

    def shortage(self, size: int = 0) -> str:
        """The reason why nothing more, or no file of `size` bytes, is written to it, or ''."""
        if not self.least_free:
            return ""
        free = shutil.disk_usage(self.folder).free
        if free >= self.least_free + size:
            return ""
        more = f" and the {size >> 20} MiB to be written" if size else ""
        return (
            f"the disk of {self.name} has {free >> 20} MiB free, less than engine.free_disk_bytes "
            f"({self.least_free >> 20} MiB){more}"
        )

    def check(self, size: int = 0) -> None:
        """Raises Unavailable when there is a shortage."""
        if shortage := self.shortage(size):
            raise Unavailable(shortage)

    def copy(self, data: IO[bytes], target: BinaryIO) -> None:
        """Copies a file to this disk. Raises Unavailable as soon as there is a shortage."""
        while piece := data.read(_PIECE):
            self.check()
            target.write(piece)


@dataclass(frozen=True, slots=True)
class TemporaryCopies:
    """The temporary copies of one process, for the archives that it sends: at most `_MOST_COPIES` at once, and all of
    them leave `least_free` bytes of the disk free."""

    least_free: int
    _sizes: dict[Path, int] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @contextmanager
    def folder(self, size: int) -> Iterator[Path]:
        """Yields a folder for a copy of at most `size` bytes, and removes it at the end. Raises Unavailable when there
        are enough copies already, or the disk may have no room for this one."""
        with self._begin(size) as name:
            folder = Path(name)
            try:
                yield folder
            finally:
                with self._lock:
                    del self._sizes[folder]

    def _begin(self, size: int) -> tempfile.TemporaryDirectory[str]:
        with self._lock:
            if len(self._sizes) >= _MOST_COPIES:
                raise Unavailable(f"{_MOST_COPIES} archives are being sent here already; try again soon")
            unwritten = sum(max(0, most - _bytes_in(folder)) for folder, most in self._sizes.items())
            Disk("temporary files", Path(tempfile.gettempdir()), self.least_free).check(unwritten + size)
            made = tempfile.TemporaryDirectory(prefix="tinsmith-copy-")
            self._sizes[Path(made.name)] = size
            return made


def _bytes_in(folder: Path) -> int:
    """The bytes of the files in a folder, without those behind a file that goes meanwhile."""
    found = 0
    with suppress(FileNotFoundError):
        for file in folder.iterdir():
            found += file.stat().st_size
    return found
