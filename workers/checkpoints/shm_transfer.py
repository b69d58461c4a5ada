"""New weights on their way to samplers: through this machine's memory, and behind that to the object store.

The folder in shared memory has a folder for each adapter, named after its object-store prefix, with a checkpoint's
files and manifest, there whole or not at all. What is missed here is found in the object store, or made again from
the journal.
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

import redis

from app.domain.checkpoints import MANIFEST, MODELS, Place
from app.domain.records import Handover, Model
from app.stores.interfaces.records import Records
from app.stores.objects.base import ObjectStore, check_key
from app.stores.objects.notes import remove_checkpoint
from workers.checkpoints import transfer
from workers.checkpoints.coalescing import Latest

log = logging.getLogger(__name__)
_CLOSE_S = 2.0

# Its commit follows within seconds, or never: nobody refers to what is older and has no hand-over record.
_STALE_S = 60.0
# No key has it.
_SLASH = ","


class Handovers:
    """Adapters that samplers may use before they are in the object store. Its thread uploads, and tries again.

    A hand-over is on record from its commit until its upload has ended (records.Handover). Whoever owns the model then
    answers for it: its files are in this machine's folder, or the journal makes them again.
    """

    def __init__(self, store: ObjectStore, index: Records, folder: HandoverFolder, retry_s: float = 5.0) -> None:
        self._store, self._index, self._folder = store, index, folder
        self._lost: set[str] = set()
        self._uploads: Latest[None] = Latest("hand-overs", self._upload, retry_s)

    def begin(self) -> None:
        """Upload what an earlier process of this machine left in the folder, whoever owns those models now.

        With the state server away it is left for the next owner to go on with.
        """
        with suppress(redis.RedisError):
            self._folder.make_room(self._is_on_record)
            for prefix in list(self._folder.prefixes()):
                if self._is_on_record(prefix):
                    self.send(_place(prefix).model_id)

    def give(self, prefix: str, fill: Callable[[Path], None]) -> bool:
        """Put a checkpoint where samplers of this machine find it; False when there is no room for it here."""
        if self._folder.write(prefix, fill):
            return True
        self._folder.make_room(self._is_on_record)
        return self._folder.write(prefix, fill)

    def send(self, model_id: str) -> None:
        """Upload what is on record of a model."""
        self._uploads.put(model_id, None, at_once=True)

    def sent(self, prefix: str) -> None:
        """It is in the object store."""
        self._index.delete(Handover.namespace, prefix)

    def resume(self, model_id: str) -> dict[int, str]:
        """By seq, the prefixes of what has to be made again for a model that is being brought back here."""
        self._lost.discard(model_id)
        missing = [prefix for prefix in self._on_record(model_id) if self._folder.find(prefix) is None]
        return {_place(prefix).seq: prefix for prefix in missing}

    def lost(self) -> set[str]:
        """Models of which the folder lost something that was not uploaded: they have to be brought back anew."""
        return set(self._lost)

    def give_up(self, model_id: str) -> None:
        """Nothing can bring the model back: whoever waits for one of its adapters is told so."""
        for prefix in self._on_record(model_id):
            log.error("an adapter that was handed over is lost: %s", prefix)
            self.sent(prefix)

    def finish(self, model_id: str, within_s: float) -> None:
        """Returns when all of the model is uploaded, or something failed, or after `within_s`."""
        self._uploads.finish(model_id, within_s)

    def close(self) -> None:
        """Ends the thread behind what it is doing, if that is soon; the rest stays on record."""
        self._uploads.close(_CLOSE_S)

    def _upload(self, model_id: str, _: None) -> None:
        for prefix in self._on_record(model_id):
            folder = self._folder.find(prefix)
            if folder is not None:
                transfer.complete(self._store, prefix, folder)
            elif not transfer.is_there(self._store, prefix):
                self._lost.add(model_id)
                continue
            self.sent(prefix)
            self._remove_if_ended(model_id, prefix)
            self._folder.release(prefix)
            self._folder.remove_older(prefix, self._is_on_record)

    def _remove_if_ended(self, model_id: str, prefix: str) -> None:
        """The end of a run removes its files, but not what comes after it.

        An unknown model has ended and was forgotten, or the state server was emptied: then no rebuild brings back who
        would sample this.
        """
        model = self._index.get(Model.namespace, model_id)
        if model is None or model.get("ended"):
            remove_checkpoint(self._store, prefix)
            self._folder.remove(prefix)

    def _on_record(self, model_id: str) -> list[str]:
        return [prefix for prefix, _ in self._index.list(Handover.namespace, f"{MODELS}/{model_id}/")]

    def _is_on_record(self, prefix: str) -> bool:
        return self._index.get(Handover.namespace, prefix) is not None


def _place(prefix: str) -> Place:
    place = Place.parse(prefix)
    assert place is not None, f"{prefix} is no prefix of ours"
    return place


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
            names = [*transfer.manifest_in(source).files, MANIFEST]
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
