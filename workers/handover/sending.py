"""The trainer's side of a hand-over: into this machine's memory before the commit, to the object store behind it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import redis

from app.domain.checkpoints import MODELS, Place
from app.domain.records import Handover, Model
from app.stores.interfaces import ObjectStore, Records
from app.stores.objects.removal import remove_checkpoint
from workers import checkpoints
from workers.handover.folder import HandoverFolder
from workers.snapshots.background import Latest

log = logging.getLogger(__name__)
_CLOSE_S = 2.0


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
                checkpoints.complete(self._store, prefix, folder)
            elif not checkpoints.is_there(self._store, prefix):
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
