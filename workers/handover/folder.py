"""The folder in shared memory through which a trainer hands adapters to the samplers of its machine.

It has a folder for each, named after its object-store prefix, with a checkpoint's files and manifest, there whole or
not at all. What is missed here is found in the object store, or made again from the journal: it may be emptied at any
time.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from app.domain.checkpoints import MANIFEST, Place
from app.stores.objects.keys import check_key
from workers import checkpoints

log = logging.getLogger(__name__)
# Its commit follows within seconds, or never: nobody refers to what is older and has no hand-over record.
_STALE_S = 60.0
# No key has it.
_SLASH = ","


@dataclass(frozen=True, slots=True)
class HandoverFolder:
    """Holds at most `most_bytes`; writers that meet may pass that by what each of them writes."""

    root: Path
    most_bytes: int

    def write(self, prefix: str, fill: Callable[[Path], None]) -> bool:
        """Have what `fill` writes there; what is there already stays. False, and a warning, when that cannot be."""
        target = self._at(prefix)
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_ours():
                raise PermissionError(f"{self.root} belongs to user {self.root.stat().st_uid}, not to {os.getuid()}")
            if not target.is_dir():
                self._write(target, fill)
        except OSError as error:
            log.warning("%s is not handed over: %s", prefix, error)
            return False
        return True

    def find(self, prefix: str) -> Path | None:
        folder = self._at(prefix)
        return folder if self._is_ours() and folder.is_dir() else None

    def take(self, prefix: str, target: Path) -> bool:
        """Link or copy the files, manifest included, into a new folder; False when they are not here (any more)."""
        source = self.find(prefix)
        if source is None:
            return False
        try:
            names = [*checkpoints.manifest_in(source).files, MANIFEST]
            target.mkdir()
            for name in names:
                _bring(source / name, target / name)
        except FileNotFoundError:
            shutil.rmtree(target, ignore_errors=True)
            return False
        return True

    def prefixes(self) -> Iterator[str]:
        for manifest in self.root.glob(f"*/{MANIFEST}"):
            yield manifest.parent.name.replace(_SLASH, "/")

    def remove(self, prefix: str) -> None:
        """Nobody sees a part of it."""
        with suppress(FileNotFoundError), tempfile.TemporaryDirectory(dir=self.root, prefix=".gone-") as gone:
            self._at(prefix).rename(Path(gone) / "files")

    def release(self, prefix: str) -> None:
        """It is elsewhere too, and may go when room is needed."""
        with suppress(FileNotFoundError):
            os.utime(self._at(prefix), (0, 0))

    def remove_older(self, prefix: str, is_needed: Callable[[str], bool]) -> None:
        """Remove the earlier versions of the same model that are not needed any more."""
        model_id, *newest = _version(prefix)
        for other in list(self.prefixes()):
            its_model, *version = _version(other)
            if its_model == model_id and version < newest and not is_needed(other):
                self.remove(other)

    def make_room(self, is_needed: Callable[[str], bool]) -> None:
        """Remove what is not needed, and what a process left half-written; of what is recent only what was released."""
        for prefix in list(self.prefixes()):
            if _is_stale(self._at(prefix)) and not is_needed(prefix):
                self.remove(prefix)
        for leftover in self.root.glob(".*"):
            if _is_stale(leftover):
                shutil.rmtree(leftover, ignore_errors=True)

    def _write(self, target: Path, fill: Callable[[Path], None]) -> None:
        if self._used() >= self.most_bytes:  # a whole model is much to write in vain
            raise OSError(f"{self.root} holds engine.handover_bytes ({self.most_bytes}) already")
        with tempfile.TemporaryDirectory(dir=self.root, prefix=".new-") as temporary:
            files = Path(temporary) / "files"
            files.mkdir()
            fill(files)
            if self._used() > self.most_bytes:
                raise OSError(f"{self.root} would hold more than engine.handover_bytes ({self.most_bytes})")
            files.rename(target)

    def _at(self, prefix: str) -> Path:
        return self.root / check_key(prefix).replace("/", _SLASH)

    def _used(self) -> int:
        sizes = 0
        for folder, _, names in os.walk(self.root):
            for name in names:
                with suppress(FileNotFoundError):
                    sizes += (Path(folder) / name).stat().st_size
        return sizes

    def _is_ours(self) -> bool:
        """Anybody may make a folder in shared memory, under this name too."""
        return self.root.is_dir() and self.root.stat().st_uid == os.getuid()


def _version(prefix: str) -> tuple[str, int, int]:
    """The model, and what grows with each of its versions."""
    place = Place.parse(prefix)
    return (place.model_id, place.epoch, place.seq) if place else ("", 0, 0)


def _bring(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:  # another file system
        shutil.copyfile(source, target)


def _is_stale(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > _STALE_S
    except FileNotFoundError:
        return False
