"""Kill point of an API process under test: the process kills itself there, once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

BEFORE_JOURNAL = "before the journal"
BEFORE_DISPATCH = "between journal and dispatch"


class Fuse:
    """A file that names the kill point. The first call that reaches it removes the file and dies."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "fuse"

    def set(self, point: str) -> None:
        self._file.write_text(point)

    def is_set(self) -> bool:
        return self._file.exists()

    def burn(self, point: str) -> None:
        if self.is_set() and self._file.read_text() == point:
            self._file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
