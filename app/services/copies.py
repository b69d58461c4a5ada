"""Copies of checkpoints in another project or session: files of their own, in a run of their own that nobody trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from app import ids
from app.domain import records
from app.domain.checkpoints import MANIFEST, Manifest, Place
from app.domain.identity import Caller
from app.domain.records import Checkpoint, Model, Session
from app.errors import BadRequest
from app.services import audit
from app.services.allowances import AllowanceService
from app.services.lists import check_writable
from app.services.ownership import load_owned
from app.services.sources import Sources
from app.services.training import check_ttl
from app.stores.interfaces import Lifecycle, ObjectStore, OpLog, Records

# What was never trained has no history: its only checkpoint is of the first seq under the first epoch.
_SEQ, _EPOCH = 1, 1


@dataclass(frozen=True, slots=True)
class CopyService:
    """The run comes first, so that files of a copy that broke off belong to one the sweeper knows; then the files, the
    manifest, and the record, by which it is there. Made again under the same key, it goes on where it broke off."""

    records: Records
    oplog: OpLog
    lifecycle: Lifecycle
    objects: ObjectStore
    allowances: AllowanceService
    sources: Sources

    def copy(self, caller: Caller, asked: Mapping[str, Any], key: str | None, token: str | None = None) -> str:
        """The path of the copy; the same one for a repeat under the same `key`. `token` as in Sources.

        Raises NotFound (checkpoint, project, session) or BadRequest.
        """
        path = ids.TinkerPath.parse(asked["source_path"])
        check_ttl(asked["ttl_seconds"])
        source = self.sources.find(path, caller, token)
        session_id, model_id, project = self._destination(caller, asked, key)
        target = ids.TinkerPath(model_id, path.kind, path.name)
        is_there = self.records.get(Checkpoint.namespace, str(target)) is not None
        if not is_there:
            self.allowances.copy(caller, project, source.size_bytes)
        self._register(session_id, model_id, project, str(path), source)
        if not is_there:
            what = {"model_id": model_id, "tinker_path": str(target), "source_path": str(path)}
            audit.note(self.records, caller, project, "checkpoint_copy", what)
            manifest = self._write(target, project, source, asked["ttl_seconds"])
            self._record(target, replace(source, key=caller.key_id), manifest)
        return str(target)

    def _destination(self, caller: Caller, asked: Mapping[str, Any], key: str | None) -> tuple[str, str, str]:
        """Session, run and project."""
        session_id, seq, project = asked["session_id"], asked["model_seq_id"], asked["destination_project_id"]
        if session_id is not None and seq is not None and project is None:
            owner = load_owned(self.records, Session, session_id, caller).owner
            return session_id, ids.model_id(session_id, seq), owner
        if session_id is not None or seq is not None or project is None:
            raise BadRequest("send destination_project_id, or session_id and model_seq_id")
        check_writable(caller, project)
        session_id = ids.copy_session_id(project, key)
        now, name = self.records.now(), f"copy of {asked['source_path']}"
        session = Session(project, now, display_name=name, user=caller.user)
        if self.records.put_new(Session.namespace, session_id, records.dump(session)):
            self.lifecycle.finish(session_id, "success")
        return session_id, ids.model_id(session_id, 0), project

    def _register(self, session_id: str, model_id: str, project: str, path: str, source: Checkpoint) -> None:
        stored = self.records.get(Model.namespace, source.model_id)
        model = Model(
            project,
            session_id,
            source.base_model,
            self.records.now(),
            "ready",
            source.lora,
            records.load(Model, stored).user_metadata if stored else {},
            full=source.full,
            critic=source.critic,
            copied_from=path,
        )
        head = {"applied": str(_SEQ), "epoch": str(_EPOCH), "ended": "copied"}
        if not self.oplog.create_model(model_id, {**records.dump(model), **head}):
            there = self.records.get(Model.namespace, model_id)
            if there is not None and records.load(Model, there).copied_from != path:
                raise BadRequest(f"{model_id} was used for another one; copy into another model_seq_id")

    def _write(self, target: ids.TinkerPath, project: str, source: Checkpoint, ttl_seconds: int | None) -> Manifest:
        prefix, now = str(_place(target)), self.records.now()
        for name in source.files:
            self.objects.copy(f"{source.prefix}/{name}", f"{prefix}/{name}")
        manifest = replace(
            Manifest.from_json(self.objects.read(f"{source.prefix}/{MANIFEST}")),
            path=str(target),
            generation=f"{_SEQ}-{_EPOCH}",
            model_id=target.model_id,
            owner=project,
            seq=_SEQ,
            epoch=_EPOCH,
            created=datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"),
            expires_at=None if ttl_seconds is None else now + ttl_seconds,
        )
        if self.objects.put_new(f"{prefix}/{MANIFEST}", manifest.to_json()):
            return manifest
        return Manifest.from_json(self.objects.read(f"{prefix}/{MANIFEST}"))

    def _record(self, target: ids.TinkerPath, source: Checkpoint, manifest: Manifest) -> None:
        copy = replace(
            source,
            owner=manifest.owner,
            model_id=target.model_id,
            prefix=str(_place(target)),
            created=datetime.fromisoformat(manifest.created).timestamp(),
            expires_at=manifest.expires_at,
            public=False,
        )
        self.records.put_new(Checkpoint.namespace, str(target), records.dump(copy))


def _place(target: ids.TinkerPath) -> Place:
    return Place(target.model_id, target.kind, target.name, _EPOCH, _SEQ)
