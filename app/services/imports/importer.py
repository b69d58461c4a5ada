"""Makes checkpoints of files that were not written by a worker here. The files were checked before.

The order is that of a copy (app/services/checkpoints.py): the run first, then the files, the manifest, and last the
record, which makes the checkpoint visible. The run's only seq is computed from its files. So an import never gets other
files or a second manifest, and a rebuild gives the same record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from app import ids
from app.domain.accounts import Caller
from app.domain.checkpoints import MANIFEST, CheckpointPrefix, FileEntry, Manifest
from app.domain.ops import LoraSpec
from app.domain.records import Checkpoint, Model, Session
from app.errors import BadRequest
from app.services.tenants import audit
from app.services.tenants.limits import QuotaService
from app.stores.objects.base import ObjectStore, file_entry
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords, dump

KIND, NAME = "external_weights", "imported"
# The run is never trained, so it has the first epoch.
_EPOCH = 0
_SEQ_DIGITS = 12


def path_of(session_id: str) -> ids.TinkerPath:
    """The path of the checkpoint that is imported into a session of its own."""
    return ids.TinkerPath(ids.model_id(session_id, 0), KIND, NAME)


@dataclass(frozen=True, slots=True)
class Importer:
    """Makes checkpoints of checked files, each in a run of its own."""

    records: RedisRecords
    oplog: RedisOpLog
    lifecycle: RedisLifecycle
    objects: ObjectStore
    quotas: QuotaService

    def add(
        self,
        caller: Caller | None,
        project: str,
        session_id: str,
        base_model: str,
        lora: LoraSpec | None,
        files: Mapping[str, Path],
    ) -> str:
        """Makes an external checkpoint of `files`, and returns its path. The caller is None for the operator; `lora` is
        None for all weights of a model. Where the checkpoint exists, a repeat changes nothing.

        Raises LimitReached or TooManyRequests, BadRequest for other files than those of an earlier attempt, and
        Unavailable.
        """
        path, size = path_of(session_id), sum(file.stat().st_size for file in files.values())
        if self.records.get(Checkpoint.namespace, str(path)):
            return str(path)
        self.quotas.reserve(caller, project, path, size)
        made = {"model_id": path.model_id, "tinker_path": str(path), "base_model": base_model}
        audit.note(self.records, caller, project, "checkpoint_import", made, once=str(path))
        entries = {name: file_entry(file) for name, file in sorted(files.items())}
        place = _place(path, _seq(entries))
        self._add_run(caller, project, place, base_model, lora)
        self.lifecycle.use_files(str(place))
        for name, file in files.items():
            self.objects.put_new(f"{place}/{name}", file)
        manifest = self._put_manifest(path, place, project, base_model, lora, entries)
        self.records.put_reserved(str(path), Checkpoint.of(place, manifest, caller.key_id if caller else ""))
        return str(path)

    def _add_run(
        self, caller: Caller | None, project: str, place: CheckpointPrefix, base_model: str, lora: LoraSpec | None
    ) -> None:
        """Makes the run, whose only seq is that of the content. Raises BadRequest if it was made for other content."""
        session_id, now = ids.session_of(place.model_id), self.records.now()
        user, key = (caller.user, caller.key_id) if caller else ("", "")
        session = Session(project, now, display_name=f"import for {base_model}", user=user)
        self.records.put_new(Session.namespace, session_id, dump(session))
        self.lifecycle.finish(session_id, "success")  # also where an earlier attempt broke off before it
        spec = asdict(lora) if lora else {}
        model = Model(project, session_id, base_model, now, "ready", spec, full=lora is None, key=key, user=user)
        # The seq counts as committed, so files of an attempt that broke off are orphans, not a save that runs.
        head = {"applied": str(place.seq), "epoch": str(_EPOCH), "ended": "imported"}
        if not self.oplog.create_model(place.model_id, {**dump(model), **head}):
            made = self.records.get(Model.namespace, place.model_id) or {}
            if made.get("applied") != str(place.seq):
                raise BadRequest("an earlier finish of this upload had other files, so start a new upload for these")

    def _put_manifest(
        self,
        path: ids.TinkerPath,
        place: CheckpointPrefix,
        project: str,
        base_model: str,
        lora: LoraSpec | None,
        entries: Mapping[str, FileEntry],
    ) -> Manifest:
        """Stores the manifest, and returns the one that is there."""
        manifest = Manifest(
            path=str(path),
            generation=place.generation,
            model_id=path.model_id,
            owner=project,
            base_model=base_model,
            lora=lora,
            seq=place.seq,
            epoch=_EPOCH,
            created=datetime.fromtimestamp(self.records.now(), UTC).isoformat(timespec="milliseconds"),
            files=dict(entries),
            threads=0,
            cpu="",
        )
        if self.objects.put_new(f"{place}/{MANIFEST}", manifest.to_json()):
            return manifest
        return Manifest.from_json(self.objects.read(f"{place}/{MANIFEST}"))


def _place(path: ids.TinkerPath, seq: int) -> CheckpointPrefix:
    return CheckpointPrefix(path.model_id, path.kind, path.name, _EPOCH, seq)


def _seq(entries: Mapping[str, FileEntry]) -> int:
    """The number of a content: files of other attempts never mix with these."""
    content = "\n".join(f"{name} {entry.sha256}" for name, entry in entries.items())
    return int(hashlib.sha256(content.encode()).hexdigest()[:_SEQ_DIGITS], 16)
