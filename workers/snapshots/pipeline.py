"""The way of a snapshot: a copy in memory, then files on this machine's disk, then in the object store, pointed at.

One thread writes to the disk, from where a restart takes it; another moves it to the object store and sets the pointer,
which makes it durable. So training waits for neither, and a store that is away does not keep anything off the disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from app.domain.checkpoints import SNAPSHOT, Manifest
from app.errors import Fenced, NotFound, ServerOpError
from app.stores.interfaces import Lease, OpLog
from app.stores.objects.removal import remove_checkpoint
from workers import checkpoints
from workers.saving import Saver
from workers.snapshots.background import Latest
from workers.snapshots.folder import Local, SnapshotFolder
from workers.training.base import Writer

log = logging.getLogger(__name__)
_CLOSE_S = 2.0
_HANDED_OVER_S = 2.0
_CLEAR_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Taken:
    """A copy of the state behind `seq`, in memory. `durable` is called once it, or what was written of it, is."""

    lease: Lease
    seq: int
    write: Writer
    durable: Callable[[], None]
    at_once: bool


@dataclass(frozen=True, slots=True)
class Written:
    """A snapshot on this machine's disk."""

    lease: Lease
    local: Local
    durable: Callable[[], None]


class SnapshotPipeline:
    """What fails is tried again, unless a newer snapshot of the model came; what was durable stays until the next is.

    `clear` is called now and then, when the disk has filled up a little more.
    """

    def __init__(
        self, oplog: OpLog, saver: Saver, folder: SnapshotFolder, clear: Callable[[], None], retry_s: float
    ) -> None:
        self._oplog, self._saver, self._folder, self._clear = oplog, saver, folder, clear
        self._clear_at = 0.0
        self._writes = Latest("snapshot-writes", self._write, retry_s)
        self._uploads = Latest("snapshot-uploads", self._upload, retry_s)

    def put(self, taken: Taken) -> None:
        self._writes.put(taken.lease.model_id, taken, at_once=taken.at_once)

    def resume(self, lease: Lease, local: Local, durable: Callable[[], None]) -> None:
        """Make durable what an earlier process left on the disk."""
        self._uploads.put(lease.model_id, Written(lease, local, durable), at_once=True)

    def ready(self, model_id: str) -> bool:
        """The disk has taken all it was given of the model, and has had its rest."""
        return self._writes.ready(model_id)

    def finish(self, model_id: str, within_s: float) -> None:
        """Returns when all of the model is durable, or something failed, or after `within_s`."""
        deadline = time.monotonic() + within_s
        self._writes.finish(model_id, within_s)
        self._uploads.finish(model_id, max(0.0, deadline - time.monotonic()))

    def drop(self, model_id: str) -> None:
        """Forget what waits of the model."""
        self._writes.drop(model_id)
        self._uploads.drop(model_id)

    def close(self) -> None:
        """Ends the threads behind what they are doing, if that is soon; the next start goes on with what is on disk."""
        self._writes.close(_CLOSE_S)
        self._uploads.close(_CLOSE_S)

    def _write(self, model_id: str, taken: Taken) -> None:
        def fill(folder: Path) -> None:
            taken.write(folder)
            checkpoints.seal(folder, self._saver.describe(folder, taken.lease, taken.seq))

        try:
            local = self._folder.write(model_id, taken.seq, taken.lease.epoch, fill)
        except NotFound:
            return  # the model is no more
        self._uploads.put(model_id, Written(taken.lease, local, taken.durable), at_once=taken.at_once)
        sent = self._uploads.item(model_id)
        self._folder.prune(model_id, local, keep=sent.local if sent is not None else None)
        if time.monotonic() >= self._clear_at:
            self._clear()
            self._clear_at = time.monotonic() + _CLEAR_EVERY_S

    def _upload(self, model_id: str, written: Written) -> None:
        manifest = self._verified(model_id, written.local)
        if manifest is None:
            return
        # Under the epoch that will point at it, which may be a later one than wrote it: nobody else touches that.
        epoch = written.lease.epoch
        manifest = replace(manifest, generation=f"{manifest.seq}-{epoch}", epoch=epoch)
        prefix = checkpoints.prefix_for(model_id, SNAPSHOT, str(manifest.seq), manifest.generation)
        try:
            checkpoints.upload(self._saver.store, prefix, written.local.path, manifest)
            # The journal is not trimmed before that; this saves coming back for it.
            self._saver.handovers.finish(model_id, _HANDED_OVER_S)
            replaced = self._oplog.set_snapshot(written.lease, manifest.seq, prefix)
        except Fenced as fenced:
            # What was uploaded is swept as an orphan.
            log.info("a snapshot came too late: %s", fenced, extra={"model_id": model_id})
            return
        written.durable()
        self._folder.prune(model_id, written.local)
        if replaced not in ("", prefix):
            remove_checkpoint(self._saver.store, replaced)

    def _verified(self, model_id: str, local: Local) -> Manifest | None:
        try:
            return checkpoints.verify(local.path)
        except FileNotFoundError:
            pass  # the model is no more, or another trainer on this machine is further
        except ServerOpError as error:
            log.error("a local snapshot is of no use: %s", error, extra={"model_id": model_id})
            self._folder.remove(local)
        return None
