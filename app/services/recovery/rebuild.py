"""Rebuild: restores the records of runs and checkpoints from their manifests."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime

from pydantic import TypeAdapter

from app import ids
from app.domain.checkpoints import MANIFEST, MODELS, OWNER, SNAPSHOT, CheckpointPrefix, Manifest
from app.domain.records import Checkpoint, Model, Session
from app.errors import BadRequest, NotFound
from app.stores.objects.base import ObjectStore
from app.stores.objects.notes import has_note, read_moves, read_note
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords, dump
from app.stores.redis.types import Record

log = logging.getLogger(__name__)
KeysByPlace = dict[CheckpointPrefix, list[str]]
"""The keys of each place of one model."""
_TYPED = TypeAdapter(Manifest)
# Owners that wrote only local snapshots left no trace of their epochs in the object store. No run has a million epochs.
_FAR = 2**20


@dataclass
class Restored:
    """The result of a rebuild. `runs` maps each restored run to the seq after which it continues. `ended` lists the
    runs of which only checkpoints are left. `checkpoints` lists the restored paths.

    `known` counts runs that were already there and did not change. `set_back` lists runs that were known only in an
    earlier state. `expired` checkpoints and `damaged` places were left out.
    """

    runs: dict[str, int] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    known: int = 0
    set_back: list[str] = field(default_factory=list)
    expired: int = 0
    damaged: list[str] = field(default_factory=list)


class Rebuild:
    """Adds missing runs and checkpoints and changes nothing else, so it can run at any time and more than once.

    The one exception is a run that has lost its later history. Its paths then point to the newest saved checkpoints,
    and the run gets a new, much higher epoch. That epoch is also the run's floor: files from the lost history are never
    taken for files of the new history.
    """

    def __init__(
        self, oplog: RedisOpLog, lifecycle: RedisLifecycle, records: RedisRecords, objects: ObjectStore
    ) -> None:
        self._oplog, self._lifecycle, self._records, self._objects = oplog, lifecycle, records, objects
        self._restored = Restored()
        self._moves: dict[str, str] = {}

    def __call__(self) -> Restored:
        """Rebuilds everything. Raises Unavailable, after which it can be run again."""
        self._restored, self._moves = Restored(), read_moves(self._objects)
        for model_id, found in self._models().items():
            head = self._records.get(Model.namespace, model_id)
            if head is None:
                self._restore(model_id, found)
            elif lost := [place for place in found if self._is_lost(place, head)]:
                self._catch_up(model_id, found, lost)
            else:
                self._restored.known += 1
        return self._restored

    def _models(self) -> dict[str, KeysByPlace]:
        models: defaultdict[str, KeysByPlace] = defaultdict(dict)
        for key in self._objects.list(f"{MODELS}/"):
            place = CheckpointPrefix.parse(key)
            if place is not None:
                models[place.model_id].setdefault(place, []).append(key)
        return models

    def _is_lost(self, place: CheckpointPrefix, head: Record) -> bool:
        """True if the place was written after the state that the state server has of its run. A save in progress is
        journaled, and the objects were listed before `head` was read, so the objects cannot be ahead of `head` for
        another reason."""
        epoch = int(head["epoch"])
        if place.epoch != epoch or place.seq <= int(head["applied"]):
            return place.epoch > epoch
        return not self._oplog.waiting(place.model_id, place.seq, 1)

    def _catch_up(self, model_id: str, found: KeysByPlace, lost: list[CheckpointPrefix]) -> None:
        """Restores a run that was set back. The new epoch is written last, because after it nothing counts as lost."""
        for place, manifest in self._newest_of_each(lost, found):
            if manifest.path:
                self._restore_checkpoint(place, manifest)
        epoch = str(max(place.epoch for place in lost) + _FAR)
        self._records.update(Model.namespace, model_id, {"epoch": epoch, "epoch_floor": epoch})
        self._restored.set_back.append(model_id)

    def _restore(self, model_id: str, found: KeysByPlace) -> None:
        """Restores a missing run. Its record is written last, so a run that has a record was restored completely."""
        snapshot, manifests = None, []
        for place, manifest in self._newest_of_each(found, found):
            manifests.append(manifest)
            if place.kind == SNAPSHOT:
                snapshot = place
            elif manifest.path:
                self._restore_checkpoint(place, manifest)
        if manifests:
            self._restore_run(model_id, manifests, snapshot, max(place.epoch for place in found) + _FAR)

    def _newest_of_each(
        self, places: Iterable[CheckpointPrefix], found: KeysByPlace
    ) -> Iterator[tuple[CheckpointPrefix, Manifest]]:
        """The newest snapshot, and the newest generation of each checkpoint."""
        by_name: defaultdict[tuple[str, str], list[CheckpointPrefix]] = defaultdict(list)
        for place in places:
            by_name[place.kind, "" if place.kind == SNAPSHOT else place.name].append(place)
        for _, generations in sorted(by_name.items()):
            newest = self._newest(generations, found)
            if newest is not None:
                yield newest

    def _newest(
        self, places: Iterable[CheckpointPrefix], found: KeysByPlace
    ) -> tuple[CheckpointPrefix, Manifest] | None:
        """The newest complete place; a half-written place has no manifest. A checkpoint with a path comes before a save
        without one, which may have the same name."""
        without_path = None
        for place in sorted(places, key=lambda place: (place.epoch, place.seq), reverse=True):
            if f"{place}/{MANIFEST}" not in found[place]:
                continue
            manifest = self._manifest(place, found[place])
            if manifest is not None and all(f"{place}/{name}" in found[place] for name in manifest.files):
                if manifest.path or place.kind == SNAPSHOT:
                    return place, manifest
                without_path = without_path or (place, manifest)
            else:
                self._restored.damaged.append(str(place))
        return without_path

    def _manifest(self, place: CheckpointPrefix, keys: list[str]) -> Manifest | None:
        """The manifest with the latest values of the fields that may change; None if it is damaged."""
        try:
            written = Manifest.from_json(self._objects.read(f"{place}/{MANIFEST}"))
            expires_at = read_note(self._objects, keys, "expires_at", written.expires_at)
            expiry_by = OWNER if has_note(keys, "expires_at") else written.expiry_by
            public = read_note(self._objects, keys, "public", written.public)
            owner = self._moves.get(ids.session_of(place.model_id), written.owner)
            newest = replace(written, expires_at=expires_at, expiry_by=expiry_by, public=public, owner=owner)
            manifest = _TYPED.validate_python(asdict(newest))
            _check(place, manifest)
        except (ValueError, TypeError, KeyError, BadRequest, NotFound) as error:
            log.warning("cannot read the manifest of %s: %s", place, error)
            return None
        return manifest

    def _restore_checkpoint(self, place: CheckpointPrefix, manifest: Manifest) -> None:
        checkpoint = Checkpoint.of(place, manifest)
        if checkpoint.is_expired(self._records.now()):
            self._restored.expired += 1
        elif self._record(manifest, checkpoint):
            self._restored.checkpoints.append(manifest.path)

    def _record(self, manifest: Manifest, checkpoint: Checkpoint) -> bool:
        """Records the checkpoint. False when the newest save at this path is recorded already."""
        fields = dump(checkpoint)
        if self._records.put_new(Checkpoint.namespace, manifest.path, fields):
            return True
        stored = self._records.find(Checkpoint, manifest.path)
        if stored is not None and self._saved(stored.prefix) >= manifest.created_at:
            return False
        self._records.put(Checkpoint.namespace, manifest.path, fields)
        return True

    def _saved(self, prefix: str) -> float:
        """The time in the manifest of a recorded checkpoint; -inf without a readable one. The record's own time is not
        comparable: it is the state server's, and a manifest has that of its worker."""
        try:
            return Manifest.from_json(self._objects.read(f"{prefix}/{MANIFEST}")).created_at
        except (ValueError, TypeError, NotFound):
            return float("-inf")

    def _restore_run(
        self,
        model_id: str,
        manifests: list[Manifest],
        snapshot: CheckpointPrefix | None,
        epoch: int,
    ) -> None:
        """Restores the run's record. Without a snapshot the run cannot continue: it has ended, and only its checkpoints
        are left."""
        last = max(manifests, key=lambda manifest: (manifest.epoch, manifest.seq))
        session_id = ids.session_of(model_id)
        created = min(manifest.created_at for manifest in manifests)
        if self._records.put_new(Session.namespace, session_id, dump(Session(last.owner, created))):
            self._lifecycle.heartbeat(session_id)
        model = Model(
            last.owner,
            session_id,
            last.base_model,
            created,
            "ready",
            asdict(last.lora) if last.lora else {},
            full=last.lora is None,
            critic=last.critic,
        )
        head = {"epoch": str(epoch), "epoch_floor": str(epoch)}
        if snapshot is None:
            head |= {"applied": str(last.seq), "ended": "deleted"}
        else:
            seq = str(snapshot.seq)
            head |= {"applied": seq, "snapshot_seq": seq, "snapshot": str(snapshot)}
        if not self._oplog.create_model(model_id, {**dump(model), **head}):
            self._restored.known += 1
        elif snapshot is None:
            self._restored.ended.append(model_id)
        else:
            self._restored.runs[model_id] = snapshot.seq


def _check(place: CheckpointPrefix, manifest: Manifest) -> None:
    """Raises ValueError or BadRequest for a manifest that was not written for this place."""
    if not ids.is_model_id(place.model_id):
        raise ValueError(f"{place.model_id!r} is not a run id")
    path = "" if place.kind == SNAPSHOT else str(ids.TinkerPath(place.model_id, place.kind, place.name))
    if path:
        ids.TinkerPath.parse(path)
    if manifest.path not in ("", path):
        raise ValueError(f"the manifest names another path: {manifest.path!r}")
    if (manifest.model_id, manifest.seq, manifest.epoch) != (place.model_id, place.seq, place.epoch):
        raise ValueError(f"the manifest is for {manifest.model_id!r}, seq {manifest.seq}, epoch {manifest.epoch}")
    if datetime.fromisoformat(manifest.created).tzinfo is None:
        raise ValueError(f"the time {manifest.created!r} in the manifest has no time zone")
