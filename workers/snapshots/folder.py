"""Snapshots on this machine's disk, `<root>/<model>/<seq>-<epoch>/`: each is there whole or not at all.

They outlive the process, so that a restart needs no object store. One is valid because it is taken only behind a
commit. Its epoch tells what an owner wrote from what its successor did; nobody touches what is newer than his own.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from app.domain.checkpoints import Manifest
from app.errors import ServerOpError
from app.stores.interfaces import Lease
from app.stores.objects.files import flush_folder
from app.stores.objects.keys import check_key
from workers import checkpoints

log = logging.getLogger(__name__)
_NAME = re.compile(r"([0-9]+)-([0-9]+)")


@dataclass(frozen=True, slots=True, order=True)
class Local:
    """A snapshot's folder. In order of age: first by seq, then by the epoch of the owner that wrote it."""

    seq: int
    epoch: int
    path: Path


@dataclass(frozen=True, slots=True)
class SnapshotFolder:
    """`node` tells this trainer from the others that may share `root`; one thread of it writes at a time."""

    root: Path
    node: str

    def write(self, model_id: str, seq: int, epoch: int, fill: Callable[[Path], None]) -> Local:
        """A snapshot with the files that `fill` writes, on disk; one that is there already stays. Raises OSError."""
        target = self._of(model_id) / f"{seq}-{epoch}"
        if not target.is_dir():
            unfinished = target.parent / f".{self.node}"
            shutil.rmtree(unfinished, ignore_errors=True)
            try:
                unfinished.mkdir(parents=True)
                fill(unfinished)
                _flush(unfinished)
                unfinished.rename(target)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
            flush_folder(target.parent)
        return Local(seq, epoch, target)

    def usable(self, lease: Lease) -> Iterator[tuple[Local, Manifest]]:
        """What `lease` may be restored from, newest first and verified. What can never be used again is removed."""
        for local in sorted(self._all(lease.model_id), reverse=True):
            if local.epoch > lease.epoch:
                continue  # our successor's
            if local.seq < lease.snapshot_seq or local.seq > lease.applied or local.epoch < lease.epoch_floor:
                # Behind the trimmed journal; ahead of one that was set back to an earlier state; or of a lost one.
                self.remove(local)
                continue
            try:
                yield local, checkpoints.verify(local.path)
            except (ServerOpError, OSError) as error:
                log.warning("a local snapshot cannot be used: %s", error, extra={"model_id": lease.model_id})
                self.remove(local)

    def prune(self, model_id: str, newest: Local, keep: Local | None = None) -> None:
        """Remove what is older than `newest`, but `keep`."""
        for local in self._all(model_id):
            if local < newest and local != keep:
                self.remove(local)

    def remove(self, local: Local) -> None:
        shutil.rmtree(local.path, ignore_errors=True)

    def forget(self, model_id: str) -> None:
        shutil.rmtree(self._of(model_id), ignore_errors=True)

    def models(self) -> list[str]:
        """Ids of those that have a folder here."""
        return sorted(path.name for path in self.root.iterdir()) if self.root.is_dir() else []

    def _of(self, model_id: str) -> Path:
        return self.root / check_key(model_id)

    def _all(self, model_id: str) -> list[Local]:
        try:
            paths = list(self._of(model_id).iterdir())
        except FileNotFoundError:
            return []
        return [Local(int(m[1]), int(m[2]), path) for path in paths if (m := _NAME.fullmatch(path.name))]


def _flush(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    flush_folder(folder)
