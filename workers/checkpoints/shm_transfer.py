"""Shared-memory transfer of new weights to samplers, followed by the upload to the object store.

The folder in shared memory has a folder for each adapter, named after its object-store prefix, with a checkpoint's
files and manifest; it is there whole or not at all. An adapter that is missing here is in the object store, or is
rebuilt from the journal.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import redis

from app.domain.checkpoints import MODELS, CheckpointPrefix
from app.domain.records import Model, ShmTransfer
from app.stack.memory import room_for_weights
from app.stores.objects.base import ObjectStore, check_key
from app.stores.objects.notes import remove_checkpoint
from app.stores.redis.records import RedisRecords
from workers.checkpoints import transfer
from workers.checkpoints.coalescing import CoalescingWorker, MakeWorker

log = logging.getLogger(__name__)
_CLOSE_S = 2.0
# What fails a restore may pass, such as a store whose files look damaged for a while.
_MOST_RESTORES = 3

# A commit follows a write within seconds, or never. Nothing refers to an older folder without a transfer record.
_STALE_S = 60.0
# No object-store key contains it.
_SLASH = ","
# An earlier version's folders have no such suffix, and their manifest has hashes. It cannot upload the ones with the
# suffix, so it must not find them: then it rebuilds their checkpoints from the journal.
_SUFFIX = ",unhashed"
# A sampler reads files in place if so many checkpoints of their size have room: the one that it holds, one that
# requests wait for, and the one that is being written.
_IN_PLACE = 3
_NEW, _GONE = ".new-", ".gone-"


class ShmTransfers:
    """Adapters that samplers may use before they are in the object store. A thread uploads them and retries.

    A transfer is on record from its commit until its upload has ended (records.ShmTransfer). The model's owner is
    responsible for it meanwhile: its files are in this machine's folder, or the journal rebuilds them.
    """

    def __init__(self, store: ObjectStore, records: RedisRecords, folder: ShmFolder, make_worker: MakeWorker) -> None:
        self._store, self._records, self._folder = store, records, folder
        self._lost: set[str] = set()
        self._failed: Counter[str] = Counter()
        """Restores of each model that failed here since the last that did not."""
        self._uploads: CoalescingWorker[None] = make_worker("shm-uploads", self._upload)

    def begin(self) -> None:
        """Uploads the adapters that an earlier process of this machine left in the folder, whoever owns those models
        now.

        While the state server is away they are left to the next owner.
        """
        with suppress(redis.RedisError):
            self._folder.make_room(self._is_on_record)
            for prefix in list(self._folder.prefixes()):
                if self._is_on_record(prefix):
                    self.upload(CheckpointPrefix.of(prefix).model_id)

    def publish(self, prefix: str, fill: Callable[[Path], None], size: int) -> bool:
        """Puts a checkpoint of about `size` bytes where samplers of this machine find it. Returns False when there is
        no room for it here."""
        if self._folder.write(prefix, fill, size):
            return True
        self._folder.make_room(self._is_on_record)
        return self._folder.write(prefix, fill, size)

    def size(self, prefix: str) -> int:
        """The bytes of a checkpoint that was put there."""
        folder = self._folder.find(prefix)
        return transfer.transferred(folder).size if folder else 0

    def upload(self, model_id: str) -> None:
        """Uploads the recorded transfers of a model."""
        self._uploads.put(model_id, None, at_once=True)

    def delete_record(self, prefix: str) -> None:
        """Deletes the transfer record: the adapter is in the object store."""
        self._records.delete(ShmTransfer.namespace, prefix)

    def resume(self, model_id: str) -> dict[int, str]:
        """The prefixes, by seq, that have to be rebuilt for a model that is being restored here."""
        self._lost.discard(model_id)
        missing = [prefix for prefix in self._on_record(model_id) if self._folder.find(prefix) is None]
        return {CheckpointPrefix.of(prefix).seq: prefix for prefix in missing}

    def lost(self) -> set[str]:
        """Models whose folder lost an adapter that was not uploaded; these models have to be restored again."""
        return set(self._lost)

    def restored(self, model_id: str) -> None:
        """Uploads the recorded transfers of a model that was restored here."""
        self._failed.pop(model_id, None)
        self._lost.discard(model_id)  # an upload may have missed what this restore rebuilt
        self.upload(model_id)

    def not_restored(self, model_id: str) -> None:
        """Uploads the adapters of a model that could not be restored, as far as their files are here, because they need
        no restore. After three failures deletes the other transfer records, so that requests for those adapters fail.
        """
        self._failed[model_id] += 1
        for prefix in self._on_record(model_id) if self._failed[model_id] >= _MOST_RESTORES else ():
            if self._folder.find(prefix) is None:
                log.error("an adapter that was not uploaded is lost, because its model cannot be restored: %s", prefix)
                self.delete_record(prefix)
        self.upload(model_id)

    def finish(self, model_id: str, within_s: float) -> None:
        """Returns when all of the model is uploaded, or something failed, or after `within_s`."""
        self._uploads.finish(model_id, within_s)

    def close(self) -> None:
        """Ends the thread after its current upload, if that is soon; the other transfers stay on record."""
        self._uploads.close(_CLOSE_S)

    def _upload(self, model_id: str, _: None) -> None:
        for prefix in self._on_record(model_id):
            folder = self._folder.find(prefix)
            if folder is not None:
                transfer.complete(self._store, prefix, folder)
            elif not transfer.is_there(self._store, prefix):
                self._lost.add(model_id)
                continue
            self.delete_record(prefix)
            self._remove_if_ended(model_id, prefix)
            self._folder.release(prefix)
            self._folder.remove_older(prefix, self._is_on_record)

    def _remove_if_ended(self, model_id: str, prefix: str) -> None:
        """Removes an uploaded adapter of an ended run: the end of a run removes its files, but not later uploads.

        An unknown model has ended and was forgotten, or the state server was emptied. In both cases no rebuild restores
        a sampling session that would use this adapter.
        """
        model = self._records.get(Model.namespace, model_id)
        if model is None or model.get("ended"):
            remove_checkpoint(self._store, prefix)
            self._folder.remove(prefix)

    def _on_record(self, model_id: str) -> list[str]:
        return [prefix for prefix, _ in self._records.list(ShmTransfer.namespace, f"{MODELS}/{model_id}/")]

    def _is_on_record(self, prefix: str) -> bool:
        return self._records.get(ShmTransfer.namespace, prefix) is not None


@dataclass(frozen=True, slots=True)
class ShmFolder:
    """The transfer folder. Holds at most `most_bytes`, and leaves a part of its file system to others; concurrent
    writers may exceed that by the size of their writes."""

    root: Path
    most_bytes: int

    def write(self, prefix: str, fill: Callable[[Path], None], size: int = 0) -> bool:
        """Writes the files that `fill` creates, of about `size` bytes; an existing folder stays. Returns False when it
        cannot, and logs a warning unless there is to be no such folder."""
        if not self.most_bytes:
            return False
        target = self._at(prefix)
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_ours():
                raise PermissionError(f"{self.root} is not a folder of user {os.getuid()}")
            if self.find(prefix) is None:
                self._write(target, fill, size)
        except OSError as error:
            log.warning("no shared-memory transfer of %s: %s", prefix, error)
            return False
        return True

    def find(self, prefix: str) -> Path | None:
        """The folder of a checkpoint's files; None when they are not here."""
        if self._is_ours():
            for folder in self._folders(prefix):
                if folder.is_dir():
                    return folder
        return None

    def take(self, prefix: str, target: Path, check_room: transfer.CheckRoom = transfer.any_size) -> bool:
        """Links or copies the files into a new folder. Returns False when they are not here (any more). Raises what
        `check_room` raises."""
        source = self.find(prefix)
        if source is None:
            return False
        try:
            manifest = transfer.transferred(source)
            check_room(manifest.size)
            target.mkdir()
            for name in manifest.files:
                _bring(source / name, target / name)
        except FileNotFoundError:
            shutil.rmtree(target, ignore_errors=True)
            return False
        return True

    @contextmanager
    def reading(self, prefix: str) -> Iterator[Path | None]:
        """Yields the folder of the files, which stay until the block ends. Yields None when they are not here (any
        more), or would leave too little room to others."""
        with ExitStack() as stack:
            try:
                folder = stack.enter_context(self._locked(self._at(prefix), fcntl.LOCK_SH))
            except OSError:
                folder = None
            has_room = folder is not None and _IN_PLACE * transfer.transferred(folder).size <= self._room()
            yield folder if has_room and self._is_ours() else None

    def prefixes(self) -> Iterator[str]:
        for folder in self.root.glob("*"):
            prefix = folder.name.removesuffix(_SUFFIX).replace(_SLASH, "/")
            if CheckpointPrefix.parse(prefix):
                yield prefix

    def remove(self, prefix: str) -> None:
        """Removes a checkpoint, unless a sampler reads it in place. No reader sees a part of it."""
        for folder in self._folders(prefix):
            try:
                with (
                    self._locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB),
                    tempfile.TemporaryDirectory(dir=self.root, prefix=_GONE) as gone,
                ):
                    folder.rename(Path(gone) / "files")
            except (FileNotFoundError, BlockingIOError):
                continue
            except OSError as error:  # a file system without locks
                log.warning("%s could not be removed from shared memory: %s", folder, error)

    def release(self, prefix: str) -> None:
        """Marks a checkpoint that is also elsewhere; it may be removed when room is needed."""
        folder = self.find(prefix)
        with suppress(FileNotFoundError):
            if folder is not None:
                os.utime(folder, (0, 0))

    def remove_older(self, prefix: str, is_needed: Callable[[str], bool]) -> None:
        """Removes the earlier versions of the same model that are not needed any more."""
        model_id, *newest = _version(prefix)
        for other in list(self.prefixes()):
            its_model, *version = _version(other)
            if its_model == model_id and version < newest and not is_needed(other):
                self.remove(other)

    def make_room(self, is_needed: Callable[[str], bool]) -> None:
        """Removes unneeded checkpoints and half-written ones, and no other file. Of the recent ones, removes only those
        that were released."""
        if not self._is_ours():
            return
        for prefix in list(self.prefixes()):
            folder = self.find(prefix)
            if folder is not None and _is_stale(folder) and not is_needed(prefix):
                self.remove(prefix)
        for leftover in (*self.root.glob(f"{_NEW}*"), *self.root.glob(f"{_GONE}*")):
            if _is_stale(leftover):
                # A writer that is alive holds the lock, however long it writes.
                with suppress(OSError), self._locked(leftover, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    shutil.rmtree(leftover, ignore_errors=True)

    @contextmanager
    def _locked(self, folder: Path, how: int) -> Iterator[Path]:
        """Locks the folder of a checkpoint, for its writer, its readers or its removal. The end of a process unlocks it
        too.

        Raises OSError: FileNotFoundError without a folder, BlockingIOError with LOCK_NB, and others on a file system
        without locks.
        """
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, how)
            if not os.path.samestat(os.fstat(descriptor), folder.stat()):
                raise FileNotFoundError(f"{folder} was removed meanwhile")
            yield folder
        finally:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile would keep the lock
            os.close(descriptor)

    def _write(self, target: Path, fill: Callable[[Path], None], size: int) -> None:
        self._check_room(size)  # writing a full model in vain costs time, and memory
        with (
            tempfile.TemporaryDirectory(dir=self.root, prefix=_NEW) as temporary,
            self._locked(Path(temporary), fcntl.LOCK_EX),
        ):
            files = Path(temporary) / "files"
            files.mkdir()
            fill(files)
            self._check_room()
            files.rename(target)

    def _check_room(self, size: int = 0) -> None:
        if self._used() + size > (room := self._room()):
            raise OSError(
                f"{self.root} would hold more than {room} bytes: engine.handover_bytes is {self.most_bytes}, and "
                "a part of its file system is left to others"
            )
        free = shutil.disk_usage(self.root).free
        if size > free:
            raise OSError(f"{size} bytes are more than the {free} free ones of {self.root}")

    def _room(self) -> int:
        return room_for_weights(self.root, self.most_bytes)

    def _at(self, prefix: str) -> Path:
        return self._folders(prefix)[0]

    def _folders(self, prefix: str) -> tuple[Path, Path]:
        """The folder of a checkpoint, and the one that an earlier version wrote."""
        name = check_key(prefix).replace("/", _SLASH)
        return self.root / f"{name}{_SUFFIX}", self.root / name

    def _used(self) -> int:
        sizes = 0
        for folder, _, names in os.walk(self.root):
            for name in names:
                with suppress(FileNotFoundError):
                    sizes += (Path(folder) / name).stat().st_size
        return sizes

    def _is_ours(self) -> bool:
        """True for a folder of this user, and no link. Any user can make either under this name in shared memory."""
        try:
            found = self.root.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _version(prefix: str) -> tuple[str, int, int]:
    """The model id, and the epoch and seq, which grow with each of its versions."""
    place = CheckpointPrefix.of(prefix)
    return place.model_id, place.epoch, place.seq


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
