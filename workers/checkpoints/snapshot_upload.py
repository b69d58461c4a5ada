"""Stores a snapshot in three steps: a copy in memory, files on this machine's disk, then the object store.

One thread writes to the disk, from which a restart reads it. Another thread uploads it to the object store and sets the
pointer, which makes it durable. So training waits for neither, and a store that is away does not delay the writes to
the disk.

Snapshots on this machine's disk lie in `<root>/<model>/<seq>-<epoch>/`; each is complete or absent. They outlive the
process, so that a restart needs no object store. A snapshot is valid because it is taken only after a commit. Its epoch
separates an owner's snapshots from those of its successor; no owner touches a newer one than its own.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import redis

from app.domain.checkpoints import SNAPSHOT, CheckpointPrefix, Manifest
from app.domain.records import Model
from app.errors import Fenced, NotFound, ServerOpError, TinsmithError
from app.stores.disk import Disk
from app.stores.objects.base import check_key, flush_folder
from app.stores.objects.notes import remove_checkpoint
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.types import Lease
from workers.backends.training.base import Writer
from workers.checkpoints import transfer
from workers.checkpoints.coalescing import CoalescingWorker, MakeWorker
from workers.checkpoints.writer import Saver

log = logging.getLogger(__name__)
_CLOSE_S = 2.0
_TRANSFERRED_S = 2.0
_CLEAR_EVERY_S = 60.0

_NAME = re.compile(r"([0-9]+)-([0-9]+)")


@dataclass(frozen=True, slots=True)
class SnapshotCopy:
    """A copy in memory of the state after `seq`. `durable` is called once the copy, or the file written from it, is
    durable."""

    lease: Lease
    seq: int
    write: Writer
    durable: Callable[[], None]
    at_once: bool


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """A snapshot on this machine's disk."""

    lease: Lease
    local: LocalSnapshot
    durable: Callable[[], None]


class SnapshotPipeline:
    """Writes and uploads snapshots. A failed step is retried, unless a newer snapshot of the model came. The previous
    durable snapshot stays until the next one is durable.

    `clear` is called now and then before a write, since only it makes room on a full disk. A copy of a model that has a
    new owner is dropped: on a full disk it would stay in memory.
    """

    def __init__(
        self,
        oplog: RedisOpLog,
        saver: Saver,
        folder: SnapshotFolder,
        clear: Callable[[], None],
        make_worker: MakeWorker,
    ) -> None:
        self._oplog, self._saver, self._folder, self._clear = oplog, saver, folder, clear
        self._clear_at = 0.0
        self._writes: CoalescingWorker[SnapshotCopy] = make_worker("snapshot-writes", self._write)
        self._uploads: CoalescingWorker[PendingUpload] = make_worker("snapshot-uploads", self._upload)

    def put(self, taken: SnapshotCopy) -> None:
        """Stores a copy soon, in place of an earlier one that still waits for the disk."""
        self._writes.put(taken.lease.model_id, taken, at_once=taken.at_once)

    def resume(self, lease: Lease, local: LocalSnapshot, durable: Callable[[], None]) -> None:
        """Makes durable a snapshot that an earlier process left on the disk."""
        self._uploads.put(lease.model_id, PendingUpload(lease, local, durable), at_once=True)

    def ready(self, model_id: str) -> bool:
        """True if the disk has stored all snapshots of the model, and its rest is over."""
        return self._writes.ready(model_id)

    def finish(self, model_id: str, within_s: float) -> None:
        """Returns when all of the model is durable, or something failed, or after `within_s`."""
        deadline = time.monotonic() + within_s
        self._writes.finish(model_id, within_s)
        self._uploads.finish(model_id, max(0.0, deadline - time.monotonic()))

    def drop(self, model_id: str) -> None:
        """Drops the waiting snapshots of the model."""
        self._writes.drop(model_id)
        self._uploads.drop(model_id)

    def close(self) -> None:
        """Ends the threads after their current work, if that is soon; the next start continues with the files on
        disk."""
        self._writes.close(_CLOSE_S)
        self._uploads.close(_CLOSE_S)

    def _write(self, model_id: str, taken: SnapshotCopy) -> None:
        self._make_room()
        if not self._is_newest(taken.lease):
            return

        def fill(folder: Path) -> None:
            taken.write(folder)
            transfer.seal(folder, self._saver.describe(folder, _place(taken.lease, taken.seq)))

        try:
            local = self._folder.write(model_id, taken.seq, taken.lease.epoch, fill, taken.write.size)
        except NotFound:
            return  # the model has been deleted
        self._uploads.put(model_id, PendingUpload(taken.lease, local, taken.durable), at_once=taken.at_once)
        sent = self._uploads.item(model_id)
        self._folder.prune(model_id, local, keep=sent.local if sent is not None else None)

    def _make_room(self) -> None:
        if time.monotonic() < self._clear_at:
            return
        self._clear_at = time.monotonic() + _CLEAR_EVERY_S
        try:
            self._clear()
        except (TinsmithError, OSError, redis.RedisError) as error:
            log.warning("the local snapshots could not be cleared: %s", error)

    def _is_newest(self, lease: Lease) -> bool:
        """True if the model lives and nobody took its lease later. An evicted model has no lease any more, but its
        snapshot is still of use until the next owner."""
        model = self._saver.records.get(Model.namespace, lease.model_id)
        return model is not None and int(model["epoch"]) == lease.epoch

    def _upload(self, model_id: str, written: PendingUpload) -> None:
        manifest = self._verified(model_id, written.local)
        if manifest is None:
            return
        # The pointer's epoch may be later than the epoch that wrote the snapshot. No other owner touches its prefix.
        place = _place(written.lease, manifest.seq)
        manifest, prefix = replace(manifest, generation=place.generation, epoch=place.epoch), str(place)
        try:
            transfer.upload(self._saver.store, prefix, written.local.path, manifest)
            # The journal is not trimmed before the transfers have ended; waiting here saves a second attempt.
            self._saver.shm_transfers.finish(model_id, _TRANSFERRED_S)
            replaced = self._oplog.set_snapshot(written.lease, manifest.seq, prefix)
        except Fenced as fenced:
            # The orphan sweep removes the uploaded files.
            log.info(
                "a snapshot was dropped, because the model has a new owner: %s", fenced, extra={"model_id": model_id}
            )
            return
        written.durable()
        self._folder.prune(model_id, written.local)
        if replaced not in ("", prefix):
            remove_checkpoint(self._saver.store, replaced)
        self._oplog.trim(model_id)

    def _verified(self, model_id: str, local: LocalSnapshot) -> Manifest | None:
        try:
            return transfer.verify(local.path)
        except FileNotFoundError:
            pass  # the model has been deleted, or another trainer on this machine has a newer one
        except ServerOpError as error:
            log.error("a local snapshot is damaged and was removed: %s", error, extra={"model_id": model_id})
            self._folder.remove(local)
        return None


def _place(lease: Lease, seq: int) -> CheckpointPrefix:
    return CheckpointPrefix(lease.model_id, SNAPSHOT, str(seq), lease.epoch, seq)


@dataclass(frozen=True, slots=True, order=True)
class LocalSnapshot:
    """A snapshot's folder. Ordered by age: first by seq, then by the epoch of the owner that wrote it."""

    seq: int
    epoch: int
    path: Path


@dataclass(frozen=True, slots=True)
class SnapshotFolder:
    """The snapshots on this machine's disk, which keeps `least_free` bytes free. `node` tells this trainer from others
    that may share `root`; one thread of it writes at a time."""

    root: Path
    node: str
    least_free: int = 0

    def write(self, model_id: str, seq: int, epoch: int, fill: Callable[[Path], None], size: int = 0) -> LocalSnapshot:
        """Writes a snapshot with the files that `fill` creates, of about `size` bytes, and flushes it; an existing one
        stays. Raises OSError, and Unavailable when it would not leave `least_free` bytes free."""
        target = self._folder_of(model_id) / f"{seq}-{epoch}"
        if not target.is_dir():
            unfinished = target.parent / f".{self.node}"
            shutil.rmtree(unfinished, ignore_errors=True)
            try:
                unfinished.mkdir(parents=True)
                Disk("the snapshots", unfinished, self.least_free).check(size)
                fill(unfinished)
                _flush(unfinished)
                unfinished.rename(target)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
            flush_folder(target.parent)
        return LocalSnapshot(seq, epoch, target)

    def usable(self, lease: Lease) -> Iterator[tuple[LocalSnapshot, Manifest]]:
        """Yields the snapshots that `lease` may be restored from, newest first and verified. Removes those that can
        never be used again."""
        for local in sorted(self._all(lease.model_id), reverse=True):
            if local.epoch > lease.epoch:
                continue  # the snapshot of our successor
            if local.seq < lease.snapshot_seq or local.seq > lease.applied or local.epoch < lease.epoch_floor:
                # It is behind the trimmed journal, ahead of a journal that was set back to an earlier state, or of a
                # lost journal.
                self.remove(local)
                continue
            with suppress(OSError):
                os.utime(local.path)  # `clear` keeps what was used just now
            try:
                yield local, transfer.verify(local.path)
            except (ServerOpError, OSError) as error:
                log.warning(
                    "a local snapshot cannot be read and was removed: %s", error, extra={"model_id": lease.model_id}
                )
                self.remove(local)

    def prune(self, model_id: str, newest: LocalSnapshot, keep: LocalSnapshot | None = None) -> None:
        """Removes the snapshots older than `newest`, except `keep`."""
        for local in self._all(model_id):
            if local < newest and local != keep:
                self.remove(local)

    def clear(self, model_id: str, durable: int, unused_s: float) -> None:
        """Removes the snapshots behind the seq of the model's durable one, which no owner uses any more, and those at
        this seq that were neither written nor used for `unused_s`: the object store has them."""
        for local in self._all(model_id):
            if local.seq < durable or (local.seq == durable and _unused_for(local.path) > unused_s):
                self.remove(local)

    def remove(self, local: LocalSnapshot) -> None:
        shutil.rmtree(local.path, ignore_errors=True)

    def forget(self, model_id: str) -> None:
        """Removes all snapshots of a model."""
        shutil.rmtree(self._folder_of(model_id), ignore_errors=True)

    def models(self) -> list[str]:
        """Ids of the models that have a folder here."""
        return sorted(path.name for path in self.root.iterdir()) if self.root.is_dir() else []

    def _folder_of(self, model_id: str) -> Path:
        return self.root / check_key(model_id)

    def _all(self, model_id: str) -> list[LocalSnapshot]:
        try:
            paths = list(self._folder_of(model_id).iterdir())
        except FileNotFoundError:
            return []
        return [LocalSnapshot(int(m[1]), int(m[2]), path) for path in paths if (m := _NAME.fullmatch(path.name))]


def _unused_for(path: Path) -> float:
    """Seconds since the folder was written or used; 0 for one that is gone meanwhile."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _flush(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    flush_folder(folder)
