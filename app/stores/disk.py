"""Keeps a part of each disk free: a full disk ends the embedded state server, and then each of its restarts.

With less than `engine.free_disk_bytes` free, new calls, files of the object store and snapshots stop. The rest is kept
for work that must go on, such as the results of admitted calls, and for deletions.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from app.errors import Unavailable

_PIECE = 2**20


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk under a folder that exists, with the bytes to keep free on it. `name` says which disk it is."""

    name: str
    folder: Path
    least_free: int

    def shortage(self) -> str:
        """The reason why nothing more is written to it, or ''."""
        free = shutil.disk_usage(self.folder).free if self.least_free else 0
        if free >= self.least_free:
            return ""
        return (
            f"the disk of {self.name} has {free >> 20} MiB free, less than engine.free_disk_bytes "
            f"({self.least_free >> 20} MiB)"
        )

    def check(self) -> None:
        """Raises Unavailable when there is a shortage."""
        if shortage := self.shortage():
            raise Unavailable(shortage)

    def copy(self, data: IO[bytes], target: BinaryIO) -> None:
        """Copies a file to this disk. Raises Unavailable as soon as there is a shortage."""
        while piece := data.read(_PIECE):
            self.check()
            target.write(piece)
