"""Checkpoints as those see them who may: listed, kept, deleted, downloaded. An expired one is not there."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from app import ids
from app.domain import records
from app.domain.identity import Caller
from app.domain.records import Checkpoint, Model
from app.errors import BadRequest
from app.services.ownership import load_owned, load_readable
from app.services.training import check_ttl
from app.stores.interfaces import ObjectStore, Records
from app.stores.objects.notes import note
from app.stores.objects.removal import remove_checkpoint

URL_SECONDS = 3600
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


class CheckpointService:
    """Reads and changes the records; the files are written by workers and only deleted here."""

    def __init__(self, store: Records, objects: ObjectStore) -> None:
        self._records = store
        self._objects = objects

    def describe_run(self, model_id: str, caller: Caller) -> dict[str, Any]:
        """A TrainingRun. Raises NotFound."""
        model = load_readable(self._records, Model, model_id, caller)
        stored = self._records.get(Model.namespace, model_id) or {}
        last_request = float(stored.get("last_request", model.created * 1000)) / 1000
        found = self._of(model_id, caller)
        return {
            "training_run_id": model_id,
            "base_model": model.base_model,
            "model_owner": model.owner,
            "is_lora": not model.full,
            "lora_rank": model.lora.get("rank"),
            "corrupted": model.state == "failed",
            "ended": "ended" in stored,
            "last_request_time": _time(last_request),
            "last_checkpoint": _newest(found, "training"),
            "last_sampler_checkpoint": _newest(found, "sampler"),
            "user_metadata": {key: str(value) for key, value in model.user_metadata.items()},
        }

    def list_run(self, model_id: str, caller: Caller) -> list[dict[str, Any]]:
        """A run's checkpoints, newest first. Raises NotFound for the run."""
        load_readable(self._records, Model, model_id, caller)
        return self._of(model_id, caller)

    def set_ttl(self, path: ids.TinkerPath, caller: Caller, ttl_seconds: int | None) -> None:
        """Counted from now; None keeps it for ever. Raises NotFound or BadRequest."""
        checkpoint = load_owned(self._records, Checkpoint, str(path), caller)
        check_ttl(ttl_seconds)
        now = self._records.now()
        expires = None if ttl_seconds is None else now + ttl_seconds
        note(self._objects, checkpoint.prefix, "expires_at", now, expires)
        self._records.update(Checkpoint.namespace, str(path), {"expires_at": json.dumps(expires)})

    def delete(self, path: ids.TinkerPath, caller: Caller) -> None:
        """The record and the manifest first, so that nobody finds half a checkpoint. Raises NotFound."""
        checkpoint = load_owned(self._records, Checkpoint, str(path), caller)
        self._records.delete(Checkpoint.namespace, str(path))
        remove_checkpoint(self._objects, checkpoint.prefix)

    def urls(self, path: ids.TinkerPath, caller: Caller) -> dict[str, Any]:
        """Signed URLs of an external checkpoint's files. Raises NotFound or BadRequest."""
        checkpoint = load_readable(self._records, Checkpoint, str(path), caller)
        if path.kind != "external_weights":
            raise BadRequest(f"{path} is not for download: save it with save_weights_external first")
        urls = {name: self._objects.presign(f"{checkpoint.prefix}/{name}", URL_SECONDS) for name in checkpoint.files}
        return {"urls": urls, "expires": _time(time.time() + URL_SECONDS)}

    def _of(self, model_id: str, caller: Caller) -> list[dict[str, Any]]:
        now = self._records.now()
        stored = self._records.list(Checkpoint.namespace, ids.checkpoint_prefix(model_id))
        loaded = [(path, records.load(Checkpoint, fields)) for path, fields in stored]
        mine = [(p, c) for p, c in loaded if caller.sees(c.owner) and not c.is_expired(now)]
        return [_dump(path, found) for path, found in sorted(mine, key=lambda pair: -pair[1].created)]


def _newest(checkpoints: list[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    return next((found for found in checkpoints if found["checkpoint_type"] == kind), None)


def _dump(path: str, found: Checkpoint) -> dict[str, Any]:
    fields: Mapping[str, Any] = {
        "checkpoint_id": ids.TinkerPath.parse(path).checkpoint_id,
        "checkpoint_type": _TYPES[found.kind],
        "time": _time(found.created),
        "tinker_path": path,
        "size_bytes": found.size_bytes,
        "public": False,
        "user_metadata": found.user_metadata or None,
        "expires_at": None if found.expires_at is None else _time(found.expires_at),
    }
    return {key: value for key, value in fields.items() if value is not None}


def _time(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).isoformat()
