"""Removes stored files without a reference: overwritten, expired and half-written checkpoints, old snapshots, uploads
that were not finished, payloads of a lost state server, and routes (app/stores/objects/routes.py) that are too old.
Then it removes the records of ended runs without files.

Mark and sweep, by the state server's clock alone: files are removed when nothing refers to them in every round for
`engine.orphan_s`. That time covers a reader that has read a reference and not yet written its own.

Files that are being written now have no reference yet. Their generation, `seq-epoch`, identifies them: a reference can
still appear only under the model's newest epoch, and only at a seq beyond the committed one. A generation with a newer
epoch than the model's comes from before the state server was set back to an earlier state; its files wait for `tinsmith
rebuild`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass

from app import ids
from app.domain.checkpoints import MODELS, SNAPSHOT, CheckpointPrefix
from app.domain.records import UPLOADS, Checkpoint, Model, Sampler, Session, Upload
from app.errors import NewerContent, Unavailable
from app.settings import EngineSettings
from app.stores.objects.base import ObjectStore
from app.stores.objects.notes import remove_checkpoint
from app.stores.objects.routes import RouteFiles
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import Pins, RedisLifecycle
from app.stores.redis.payloads import RedisPayloads
from app.stores.redis.records import RedisRecords, load

log = logging.getLogger(__name__)
# Rounds in the time a file must be unreferenced: hourly by default.
_ROUNDS = 24


@dataclass(frozen=True, slots=True)
class ModelHead:
    """A model's head: the epoch that may write, and the seqs up to which its files are committed."""

    epoch: int
    applied: int
    snapshot: str
    snapshot_seq: int

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> ModelHead:
        return cls(int(fields["epoch"]), int(fields["applied"]), fields["snapshot"], int(fields["snapshot_seq"]))

    def awaits(self, place: CheckpointPrefix) -> bool:
        """True if a commit or a rebuild may still refer to the files at `place`."""
        committed = self.snapshot_seq if place.kind == SNAPSHOT else self.applied
        return place.epoch > self.epoch or (place.epoch == self.epoch and place.seq > committed)


class Orphans:
    """Removes orphans. Keeps files of a model that the state server does not know: the state server may have been
    emptied."""

    def __init__(
        self,
        oplog: RedisOpLog,
        lifecycle: RedisLifecycle,
        records: RedisRecords,
        payloads: RedisPayloads,
        objects: ObjectStore,
        settings: EngineSettings,
    ) -> None:
        self._oplog, self._lifecycle, self._records, self._objects = oplog, lifecycle, records, objects
        self._payloads, self._pins = payloads, Pins(oplog, lifecycle, records)
        self._routes = RouteFiles(objects, records.now)
        self._period_s = settings.orphan_s / _ROUNDS
        self._next = 0.0

    def sweep(self) -> None:
        """Runs a round if one is due. The next one is due a period later also after an error, because each round lists
        the whole store."""
        if time.monotonic() < self._next:
            return
        try:
            self._remove_expired()
            self._remove_uploads()
            self._collect_known()
            self._oplog.forget_routes(before=self._routes.remove_old())
        finally:
            self._next = time.monotonic() + self._period_s

    def _remove_expired(self) -> None:
        """Deletes the records of expired checkpoints; their files then become orphans. A checkpoint that cannot be read
        stays."""
        now = self._records.now()
        for path, fields in self._records.list(Checkpoint.namespace):
            try:
                expired = load(Checkpoint, fields).is_expired(now)
            except (TypeError, ValueError):
                log.warning("a checkpoint cannot be read and is kept: %s", path)
            else:
                if expired:
                    self._records.delete_same(Checkpoint.namespace, path, fields)

    def _remove_uploads(self) -> None:
        """Deletes expired uploads, and the uploaded files that no upload needs. The files are listed first: the upload
        of a listed file was recorded before."""
        keys = self._objects.list(f"{UPLOADS}/")
        waiting = set(self._waiting_uploads())
        self._objects.delete(key for key in keys if key.split("/")[1] not in waiting)

    def _waiting_uploads(self) -> Iterator[str]:
        now = self._records.now()
        for upload_id, fields in self._records.list(Upload.namespace):
            try:
                upload = load(Upload, fields)
                expired = upload.is_expired(now)
            except (TypeError, ValueError):
                log.warning("an upload cannot be read and is kept: %s", upload_id)
                yield upload_id
            else:
                if expired:
                    self._records.delete(Upload.namespace, upload_id)
                elif not upload.finished:
                    yield upload_id

    def _collect_known(self) -> None:
        """Collects, unless a call cannot be read."""
        try:
            self._collect()
        except NewerContent as newer:
            log.warning(
                "no orphan is removed now, because a newer version of Tinsmith wrote a call that may need it: %s", newer
            )

    def _collect(self) -> None:
        unknown = self._payloads.unknown()
        places = {place for key in self._objects.list(f"{MODELS}/") if (place := CheckpointPrefix.parse(key))}
        models = dict(self._records.list(Model.namespace))
        self._forget(models, {place.model_id for place in places})
        overdue = self._lifecycle.overdue([*self._unreferenced(places, models), *unknown])
        self._objects.delete(lost := set(overdue).intersection(unknown))
        if lost:
            log.info("removed %d payloads that the state server does not know", len(lost))
        pinned = set(self._pins) if overdue else set()
        for prefix in overdue:
            if prefix not in pinned and prefix not in lost:
                self._remove(prefix)

    def _remove(self, prefix: str) -> None:
        """Removes an orphan, unless a call has begun to use its files since the records were read. One that cannot be
        removed, for example in a folder of another user, waits for the next round and keeps no other orphan."""
        try:
            with self._lifecycle.removing(prefix) as may_remove:
                if may_remove:
                    remove_checkpoint(self._objects, prefix)
                    log.info("removed an orphan: %s", prefix)
        except Unavailable as error:
            log.warning("the orphan %s cannot be removed: %s", prefix, error)

    def _forget(self, models: Mapping[str, Mapping[str, str]], stored: Container[str]) -> None:
        """Removes the records of ended runs whose session is gone and that have no files. The files of a run without a
        record would stay for ever."""
        for model_id, fields in models.items():
            if "ended" in fields and model_id not in stored and not self._is_known(model_id):
                self._records.delete(Model.namespace, model_id)

    def _is_known(self, model_id: str) -> bool:
        session = self._records.get(Session.namespace, ids.session_of(model_id))
        return session is not None or any(self._records.ids(Checkpoint.namespace, ids.checkpoint_path_prefix(model_id)))

    def _unreferenced(
        self, places: Collection[CheckpointPrefix], models: Mapping[str, Mapping[str, str]]
    ) -> Iterator[str]:
        """The prefixes that nothing refers to. The order of the reads matters: a commit made after the models were read
        is found among the records."""
        heads = {model_id: ModelHead.of(fields) for model_id, fields in models.items()}
        referenced = {head.snapshot for head in heads.values()}
        for namespace in (Checkpoint.namespace, Sampler.namespace):
            records = (fields for _, fields in self._records.list(namespace) if "given_up" not in fields)
            referenced.update(json.loads(fields["prefix"]) for fields in records)
        unknown = {place.model_id for place in places} - heads.keys()
        if unknown:
            log.warning(
                "the state server does not know %d runs whose files are in the object store; the files are kept: see "
                "`tinsmith rebuild`",
                len(unknown),
            )
        for place in places:
            head = heads.get(place.model_id)
            if head and str(place) not in referenced and not head.awaits(place):
                yield str(place)
