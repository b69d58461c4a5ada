"""Runs and checkpoints from the manifests in the object store, for a state server that was emptied."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime

from app import ids
from app.domain import records
from app.domain.checkpoints import MANIFEST, MODELS, SNAPSHOT, Manifest, Place
from app.domain.records import Checkpoint, Model, Session
from app.stores.interfaces import Lifecycle, ObjectStore, OpLog, Records
from app.stores.objects.expiry import read_expiry

log = logging.getLogger(__name__)
Found = dict[Place, list[str]]
"""The keys of each place of one model."""


@dataclass
class Restored:
    """What was restored: runs by the seq they go on behind, runs of which only checkpoints are left, paths.

    `known` runs were there and are as they were; `expired` checkpoints and `damaged` places were left out.
    """

    runs: dict[str, int] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    known: int = 0
    expired: int = 0
    damaged: list[str] = field(default_factory=list)


class Rebuild:
    """Adds what is not there and changes nothing that is, so it may run at any time, and again."""

    def __init__(self, oplog: OpLog, lifecycle: Lifecycle, store: Records, objects: ObjectStore) -> None:
        self._oplog, self._lifecycle, self._records, self._objects = oplog, lifecycle, store, objects

    def __call__(self) -> Restored:
        """Raises Unavailable, when it can be run again."""
        restored = Restored()
        for model_id, found in self._models().items():
            if self._records.get(Model.namespace, model_id) is not None:
                restored.known += 1
            else:
                self._restore(model_id, found, restored)
        return restored

    def _models(self) -> dict[str, Found]:
        models: defaultdict[str, Found] = defaultdict(dict)
        for key in self._objects.list(f"{MODELS}/"):
            place = Place.parse(key)
            if place is not None:
                models[place.model_id].setdefault(place, []).append(key)
        return models

    def _restore(self, model_id: str, found: Found, restored: Restored) -> None:
        """Its record comes last: whatever has one was restored whole."""
        by_name: defaultdict[tuple[str, str], list[Place]] = defaultdict(list)
        for place in found:
            by_name[place.kind, "" if place.kind == SNAPSHOT else place.name].append(place)
        snapshot, manifests = None, []
        for (kind, _), places in sorted(by_name.items()):
            newest = self._newest(places, found, restored)
            if newest is None:
                continue
            manifests.append(newest[1])
            if kind == SNAPSHOT:
                snapshot = newest[0]
            elif newest[1].path:
                self._restore_checkpoint(*newest, found, restored)
        if manifests:
            self._restore_run(model_id, manifests, snapshot, max(place.epoch for place in found) + 1, restored)

    def _newest(self, places: Iterable[Place], found: Found, restored: Restored) -> tuple[Place, Manifest] | None:
        """The newest that is whole; half-written ones have no manifest."""
        for place in sorted(places, key=lambda place: (place.epoch, place.seq), reverse=True):
            if f"{place}/{MANIFEST}" not in found[place]:
                continue
            manifest = self._manifest(place)
            if manifest is not None and all(f"{place}/{name}" in found[place] for name in manifest.files):
                return place, manifest
            restored.damaged.append(str(place))
        return None

    def _manifest(self, place: Place) -> Manifest | None:
        try:
            return Manifest.from_json(self._objects.read(f"{place}/{MANIFEST}"))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("the manifest of %s cannot be understood: %s", place, error)
            return None

    def _restore_checkpoint(self, place: Place, manifest: Manifest, found: Found, restored: Restored) -> None:
        checkpoint = Checkpoint(
            owner=manifest.owner,
            model_id=place.model_id,
            kind=place.kind,
            base_model=manifest.base_model,
            prefix=str(place),
            created=_unix(manifest.created),
            size_bytes=sum(entry.size for entry in manifest.files.values()),
            lora=asdict(manifest.lora),
            files=sorted(manifest.files),
            expires_at=read_expiry(self._objects, found[place], manifest.expires_at),
            user_metadata=dict(manifest.user_metadata),
        )
        if checkpoint.is_expired(self._records.now()):
            restored.expired += 1
        elif self._records.put_new(Checkpoint.namespace, manifest.path, records.dump(checkpoint)):
            restored.checkpoints.append(manifest.path)

    def _restore_run(
        self, model_id: str, manifests: list[Manifest], snapshot: Place | None, epoch: int, restored: Restored
    ) -> None:
        """Without a snapshot nothing can go on: the run has ended, and its checkpoints are what is left."""
        last = max(manifests, key=lambda manifest: (manifest.epoch, manifest.seq))
        session_id = ids.session_of(model_id)
        created = min(_unix(manifest.created) for manifest in manifests)
        if self._records.put_new(Session.namespace, session_id, records.dump(Session(last.owner, created))):
            self._lifecycle.heartbeat(session_id)
        model = Model(last.owner, session_id, last.base_model, created, "ready", asdict(last.lora))
        head = {"epoch": str(epoch)}
        if snapshot is None:
            head |= {"applied": str(last.seq), "ended": "deleted"}
        else:
            seq = str(snapshot.seq)
            head |= {"applied": seq, "snapshot_seq": seq, "snapshot": str(snapshot)}
        if not self._oplog.create_model(model_id, {**records.dump(model), **head}):
            restored.known += 1
        elif snapshot is None:
            restored.ended.append(model_id)
        else:
            restored.runs[model_id] = snapshot.seq


def _unix(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()
