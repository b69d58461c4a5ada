"""Keeps a part of each disk free: a full disk ends the embedded state server, and then each of its restarts.

With less than `engine.free_disk_bytes` free, new calls, files of the object store, saves, snapshots and copies for
downloads stop. The rest is kept for work that must go on, such as the results of admitted calls, and for deletions.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import IO, BinaryIO

from app.errors import Unavailable

_PIECE = 2**20


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk under a folder that exists, with the bytes to keep free on it. `name` says which disk it is."""

    name: str
    folder: Path
    least_free: int

    def shortage(self, size: int = 0) -> str:
        """The reason why nothing more, or no file of `size` bytes, is written to it, or ''."""
        free = shutil.disk_usage(self.folder).free if self.least_free else 0
        if not self.least_free or free >= self.least_free + size:
            return ""
        file = f" and a file of {size >> 20} MiB" if size else ""
        return (
            f"the disk of {self.name} has {free >> 20} MiB free, less than engine.free_disk_bytes "
            f"({self.least_free >> 20} MiB){file}"
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
    """The temporary copies of one process: at most `most` at once, and all of them leave `least_free` bytes of the disk
    free. `name` says what is copied."""

    name: str
    least_free: int
    most: int = 4
    _sizes: list[int] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    @contextmanager
    def folder(self, size: int) -> Iterator[Path]:
        """Yields a folder for a copy of at most `size` bytes, and removes it at the end. Raises Unavailable when there
        are enough copies already, or the disk may have no room for this one."""
        self._begin(size)
        try:
            with tempfile.TemporaryDirectory(prefix="tinsmith-copy-") as folder:
                yield Path(folder)
        finally:
            with self._lock:
                self._sizes.remove(size)

    def _begin(self, size: int) -> None:
        with self._lock:
            if len(self._sizes) >= self.most:
                raise Unavailable(f"{self.most} {self.name} are being sent here already; try again soon")
            # The other copies may not be on the disk yet.
            Disk("temporary files", Path(tempfile.gettempdir()), self.least_free).check(sum(self._sizes) + size)
            self._sizes.append(size)
