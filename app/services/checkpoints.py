"""Lists, searches, publishes, expires, copies, downloads and deletes checkpoints. An expired one counts as deleted.

A copy has its own files, in a separate run that is never trained.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from app import ids
from app.domain.accounts import Caller
from app.domain.checkpoints import MANIFEST, OWNER, CheckpointPrefix, Expiry, Manifest
from app.domain.records import Checkpoint, Model, Session
from app.errors import BadRequest, NotFound
from app.services.tenants import audit
from app.services.tenants.access import (
    Sources,
    find_public,
    first_wanted,
    list_fields,
    load_checkpoint,
    load_owned,
    page_of_checkpoints,
)
from app.services.tenants.limits import QuotaService
from app.services.validation import check_ttl
from app.services.views import CHECKPOINT_TYPES, Page, check_writable, checkpoint_view, projects, searched, timestamp
from app.signing import UrlSigner
from app.stores.objects.archives import Archive, ArchiveFiles
from app.stores.objects.base import ObjectStore
from app.stores.objects.notes import end_checkpoint, note
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import Pins, RedisLifecycle
from app.stores.redis.records import RedisRecords, dump
from app.stores.redis.types import Record

URL_SECONDS = 3600

# A run that was never trained has no history: its only checkpoint has the first seq and the first epoch.
_SEQ, _EPOCH = 1, 1
_COPIED_PREFIX = "copied_prefix"
"""The field of a copy's run with the place of the save that it copies. Runs of earlier versions have none."""


class CheckpointService:
    """Reads and changes checkpoint records. Workers write the files; this class only deletes them. A method that
    changes something also raises Forbidden for a viewer, and the errors of QuotaService."""

    def __init__(self, records: RedisRecords, objects: ObjectStore, quotas: QuotaService, pins: Pins) -> None:
        self._records = records
        self._quotas = quotas
        self._objects, self._pins = objects, pins

    def list_all(self, caller: Caller, page: Page) -> dict[str, Any]:
        """Checkpoints of all runs in the projects where the caller may work, newest first."""
        shown, cursor = page_of_checkpoints(self._records, projects(caller, "owned"), page)
        return {"checkpoints": [checkpoint_view(path, one) for path, one in shown], "cursor": cursor}

    def describe_weights(self, path: ids.TinkerPath, caller: Caller) -> dict[str, Any]:
        """The model settings needed to load the checkpoint: the body of weights_info. Raises NotFound."""
        checkpoint = load_checkpoint(self._records, path, caller)
        lora = {key: checkpoint.lora.get(key) for key in ("train_attn", "train_mlp", "train_unembed")}
        adapter = {} if checkpoint.full else {"lora_rank": checkpoint.lora["rank"], **lora}
        return {"base_model": checkpoint.base_model, "is_lora": not checkpoint.full, **adapter}

    def set_ttl(self, path: ids.TinkerPath, caller: Caller, ttl_seconds: int | None) -> None:
        """Sets the time to live, counted from now; None keeps the checkpoint for ever, whatever the project's
        keep_checkpoints. Raises NotFound or BadRequest."""
        checkpoint = load_owned(self._records, Checkpoint, str(path), caller)
        check_ttl(ttl_seconds)
        self._quotas.take(caller, checkpoint.owner)
        now = self._records.now()
        expires = None if ttl_seconds is None else now + ttl_seconds
        self._audit(caller, checkpoint, path, "checkpoint_set_ttl", ttl_seconds=ttl_seconds)
        note(self._objects, checkpoint.prefix, "expires_at", now, expires)
        if not self._update(path, checkpoint, {"expires_at": expires, "expiry_by": OWNER}):
            self.set_ttl(path, caller, ttl_seconds)

    def publish(self, path: ids.TinkerPath, caller: Caller, *, public: bool) -> None:
        """Makes the checkpoint readable for everybody with a key, or private again. A repeat is harmless. Raises
        NotFound."""
        checkpoint = load_owned(self._records, Checkpoint, str(path), caller)
        self._quotas.take(caller, checkpoint.owner)
        self._audit(caller, checkpoint, path, "checkpoint_publish" if public else "checkpoint_unpublish")
        note(self._objects, checkpoint.prefix, "public", self._records.now(), public)
        if not self._update(path, checkpoint, {"public": public}):
            self.publish(path, caller, public=public)

    def delete(self, path: ids.TinkerPath, caller: Caller) -> None:
        """Deletes a checkpoint: its files first (the manifest before the others, so that no rebuild restores it), and
        its record last, so that a repeat completes a deletion that broke off. Files that a journal loads stay until no
        replay needs them. A note in the record comes before all that: no journal gets a further load of these files.
        Raises NotFound, Forbidden, and Unavailable."""
        checkpoint = load_owned(self._records, Checkpoint, str(path), caller)
        about = {"model_id": checkpoint.model_id, "tinker_path": str(path)}
        once = f"delete {checkpoint.prefix} {checkpoint.created}"  # a copy that is made anew has the same prefix
        audit.note(self._records, caller, checkpoint.owner, "checkpoint_delete", about, once=once, urgent=True)
        # From now on `admit` refuses loads of these files, also if a newer save has just replaced them in the record.
        self._update(path, checkpoint, {"deleting": checkpoint.prefix})
        is_loaded = self._pins.may_have(checkpoint)
        end_checkpoint(self._objects, checkpoint.prefix, self._records.now(), keep_files=is_loaded)
        # A newer save that replaced it meanwhile stays.
        self._records.delete_same(Checkpoint.namespace, str(path), {"prefix": json.dumps(checkpoint.prefix)})

    def urls(self, path: ids.TinkerPath, caller: Caller) -> dict[str, Any]:
        """Signed URLs of an external checkpoint's files. Raises NotFound or BadRequest."""
        checkpoint = load_checkpoint(self._records, path, caller)
        if path.kind != "external_weights":
            raise BadRequest(f"{path} cannot be downloaded: save the weights with save_weights_external first")
        urls = {name: self._objects.presign(f"{checkpoint.prefix}/{name}", URL_SECONDS) for name in checkpoint.files}
        return {"urls": urls, "expires": timestamp(time.time() + URL_SECONDS)}

    def _update(self, path: ids.TinkerPath, found: Checkpoint, changes: Mapping[str, Any]) -> bool:
        """Changes the record. Returns False, without a change, when the checkpoint was overwritten or deleted since it
        was read: the call then begins anew, because its note is beside the old save."""
        fields = {name: json.dumps(value) for name, value in changes.items()}
        return self._records.update_same(Checkpoint.namespace, str(path), ("prefix", json.dumps(found.prefix)), fields)

    def _audit(self, caller: Caller, found: Checkpoint, path: ids.TinkerPath, event: str, **more: Any) -> None:
        about = {"model_id": found.model_id, "tinker_path": str(path), **more}
        audit.note(self._records, caller, found.owner, event, about)


class CheckpointSearch:
    """Searches checkpoints, newest first, one page at a time. A page starts right after the last checkpoint of the
    previous page. Only the checkpoints of the searched projects are read."""

    def __init__(self, records: RedisRecords) -> None:
        self._records = records

    def __call__(self, caller: Caller, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The body of checkpoints/search. Raises NotFound for a project that the caller does not see."""
        within = searched(caller, asked["owner"], asked["project_ids"])
        listed = list_fields(self._records, within, "created", "kind", "base_model", "user_metadata").items()
        places = {path: _position(path, float(fields["created"])) for path, fields in listed if _fits(fields, asked)}
        cursor = asked["cursor"] and (asked["cursor"]["last_created_at"], asked["cursor"]["last_checkpoint_uuid"])
        behind = [path for path, place in places.items() if cursor is None or place < cursor]
        paths = sorted(behind, key=places.__getitem__, reverse=True)
        found = first_wanted(self._records, caller, asked["owner"], within, paths, asked["limit"] + 1)
        shown = found[: asked["limit"]]
        answer: dict[str, Any] = {"checkpoints": [checkpoint_view(path, one) for path, one in shown]}
        if len(found) > len(shown):
            created, uuid = places[shown[-1][0]]  # the record may have changed since
            answer["next_cursor"] = {"last_created_at": created.isoformat(), "last_checkpoint_uuid": uuid}
        return answer


def _fits(fields: Record, asked: Mapping[str, Any]) -> bool:
    """True for a checkpoint with these fields that fits in all but its owner and its place."""
    return (
        asked["checkpoint_type"] in (None, CHECKPOINT_TYPES[json.loads(fields["kind"])])
        and (asked["base_models"] is None or json.loads(fields["base_model"]) in asked["base_models"])
        and asked["user_metadata"].items() <= json.loads(fields.get("user_metadata", "{}")).items()
    )


def _position(path: str, created: float) -> tuple[datetime, str]:
    return datetime.fromtimestamp(created, UTC), ids.checkpoint_uuid(path)


@dataclass(frozen=True, slots=True)
class CopyService:
    """Copies checkpoints. The order is: the run first, so that files of an interrupted copy belong to a run that
    maintenance knows; then the files, the manifest, and last the record, which makes the copy visible. A repeat under
    the same key resumes an interrupted copy. If the source was overwritten meanwhile, the repeat is refused, because
    files of two saves would mix."""

    records: RedisRecords
    oplog: RedisOpLog
    lifecycle: RedisLifecycle
    objects: ObjectStore
    quotas: QuotaService
    sources: Sources

    def copy(self, caller: Caller, asked: Mapping[str, Any], key: str | None, token: str | None = None) -> str:
        """Copies a checkpoint, and returns the copy's path; a repeat under the same `key` returns the same path, also
        when the source is gone. `token`: as in Sources.

        Raises NotFound (checkpoint, project, session), BadRequest, Forbidden for a viewer, and the errors of
        QuotaService.
        """
        path = ids.TinkerPath.parse(asked["source_path"])
        check_ttl(asked["ttl_seconds"])
        model_id, project = self._destination(caller, asked, key)
        target = ids.TinkerPath(model_id, path.kind, path.name)
        if self._is_copy(target, path):
            return str(target)
        source = self.sources.find(path, caller, token)
        if asked["session_id"] is None:
            self._add_session(ids.session_of(model_id), project, path, caller)
        with self.quotas.releasing(target):
            self.quotas.reserve(caller, project, target, source.size_bytes)
            self._add_run(model_id, project, str(path), source, caller)
            self._check_not_overwritten(model_id, source)
            self.lifecycle.use_files(str(_place(target)))
            what = {"model_id": model_id, "tinker_path": str(target), "source_path": str(path)}
            audit.note(self.records, caller, project, "checkpoint_copy", what)
            manifest = self._write(target, project, source, asked["ttl_seconds"])
            self._record(target, replace(source, key=caller.key_id), manifest)
        return str(target)

    def _destination(self, caller: Caller, asked: Mapping[str, Any], key: str | None) -> tuple[str, str]:
        """The copy's run and project."""
        session_id, seq, project = asked["session_id"], asked["model_seq_id"], asked["destination_project_id"]
        if session_id is not None and seq is not None and project is None:
            owner = load_owned(self.records, Session, session_id, caller).owner
            return ids.model_id(session_id, seq), owner
        if session_id is not None or seq is not None or project is None:
            raise BadRequest("send destination_project_id, or session_id and model_seq_id")
        check_writable(caller, project)
        return ids.model_id(ids.copy_session_id(project, key), 0), project

    def _is_copy(self, target: ids.TinkerPath, path: ids.TinkerPath) -> bool:
        """True if the target is there and is a copy of `path`, which may be gone by now."""
        run = self.records.find(Model, target.model_id)
        is_there = self.records.get(Checkpoint.namespace, str(target)) is not None
        return is_there and run is not None and run.copied_from == str(path)

    def _add_session(self, session_id: str, project: str, path: ids.TinkerPath, caller: Caller) -> None:
        session = Session(project, self.records.now(), display_name=f"copy of {path}", user=caller.user)
        self.records.put_new(Session.namespace, session_id, dump(session))
        self.lifecycle.finish(session_id, "success")  # also where an earlier attempt broke off before it

    def _metadata(self, source: Checkpoint, caller: Caller) -> dict[str, Any]:
        """The metadata of the source's run, if the caller sees the run: it is not published with a checkpoint."""
        model = self.records.find(Model, source.model_id) if caller.sees(source.owner) else None
        return model.user_metadata if model else {}

    def _add_run(self, model_id: str, project: str, path: str, source: Checkpoint, caller: Caller) -> None:
        model = Model(
            project,
            ids.session_of(model_id),
            source.base_model,
            self.records.now(),
            "ready",
            source.lora,
            self._metadata(source, caller),
            full=source.full,
            critic=source.critic,
            copied_from=path,
            user=caller.user,
        )
        head = {"applied": str(_SEQ), "epoch": str(_EPOCH), "ended": "copied", _COPIED_PREFIX: source.prefix}
        if not self.oplog.create_model(model_id, {**dump(model), **head}):
            there = self.records.find(Model, model_id)
            if there is not None and there.copied_from != path:
                raise BadRequest(
                    f"run {model_id} already holds the copy of another checkpoint; use another model_seq_id"
                )

    def _check_not_overwritten(self, model_id: str, source: Checkpoint) -> None:
        """Raises BadRequest if an attempt that broke off copied files of an earlier save of the source."""
        made = self.records.get(Model.namespace, model_id) or {}
        if made.get(_COPIED_PREFIX, source.prefix) != source.prefix:
            raise BadRequest(
                "the checkpoint was overwritten after an attempt to copy it had broken off; copy it again under a new "
                "idempotency key or, if you sent a model_seq_id, with another one"
            )

    def _write(self, target: ids.TinkerPath, project: str, source: Checkpoint, ttl_seconds: int | None) -> Manifest:
        place, now = _place(target), self.records.now()
        expiry = Expiry.of(now, ttl_seconds, self.quotas.checkpoint_ttl_s(project))
        for name in source.files:
            self.objects.copy(f"{source.prefix}/{name}", f"{place}/{name}")
        manifest = replace(
            Manifest.from_json(self.objects.read(f"{source.prefix}/{MANIFEST}")),
            path=str(target),
            generation=place.generation,
            model_id=target.model_id,
            owner=project,
            seq=_SEQ,
            epoch=_EPOCH,
            created=datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"),
            expires_at=expiry.at,
            expiry_by=expiry.by,
        )
        if not self.objects.put_new(f"{place}/{MANIFEST}", manifest.to_json()):
            # Of a copy that broke off, or of one that was deleted while a journal loads its files.
            note(self.objects, str(place), "expires_at", now, expiry.at)
            note(self.objects, str(place), "public", now, False)
        return manifest

    def _record(self, target: ids.TinkerPath, source: Checkpoint, manifest: Manifest) -> None:
        copy = replace(
            source,
            owner=manifest.owner,
            model_id=target.model_id,
            prefix=str(_place(target)),
            created=manifest.created_at,
            expires_at=manifest.expires_at,
            expiry_by=manifest.expiry_by,
            public=False,
        )
        self.records.put_reserved(str(target), copy)


def _place(target: ids.TinkerPath) -> CheckpointPrefix:
    return CheckpointPrefix(target.model_id, target.kind, target.name, _EPOCH, _SEQ)


class ArchiveService:
    """Creates archive URLs and opens archives. A URL for the checkpoint's project names its folder in the object
    store, which never changes. So an archive holds the requested version, however late it is downloaded. A URL for
    others names the checkpoint, and works only as long as that is published."""

    def __init__(self, records: RedisRecords, files: ArchiveFiles, signer: UrlSigner) -> None:
        self._records, self._files, self._signer = records, files, signer

    def url(self, path: ids.TinkerPath, caller: Caller) -> tuple[str, int]:
        """A URL that needs no key, and its expiry (Unix seconds). Raises NotFound."""
        checkpoint = load_checkpoint(self._records, path, caller)
        expires = int(time.time()) + URL_SECONDS
        route = _route(checkpoint.prefix) if caller.sees(checkpoint.owner) else _public_route(path)
        return self._signer.url(route, expires), expires

    def open(self, prefix: str, expires: int, signature: str) -> Archive:
        """The archive for a signed URL. Raises Forbidden for a URL that this server did not sign or that has expired;
        NotFound, Unavailable."""
        self._signer.check(_route(prefix), expires, signature)
        return self._files.open(prefix)

    def open_public(self, path: ids.TinkerPath, expires: int, signature: str) -> Archive:
        """The same for the URL of a published checkpoint. Raises NotFound also when it is no longer published."""
        self._signer.check(_public_route(path), expires, signature)
        checkpoint = find_public(self._records, path)
        if checkpoint is None:
            raise NotFound("this checkpoint is no longer published")
        return self._files.open(checkpoint.prefix)


def _route(prefix: str) -> str:
    return f"archives/{prefix}"


def _public_route(path: ids.TinkerPath) -> str:
    return f"public_archives/{path.model_id}/{path.kind}/{path.name}"
