"""Checkpoints as those see them who may: listed, kept, published, deleted, downloaded. An expired one is not there."""

from __future__ import annotations

import json
import time
from types import MappingProxyType
from typing import Any

from app import ids
from app.domain import records
from app.domain.identity import Caller
from app.domain.records import Checkpoint
from app.errors import BadRequest
from app.services import audit
from app.services.allowances import AllowanceService
from app.services.lists import Page, projects
from app.services.ownership import load_checkpoint, load_owned
from app.services.training import check_ttl
from app.services.views import checkpoint_view, timestamp
from app.stores.interfaces import ObjectStore, Records
from app.stores.objects.notes import note
from app.stores.objects.removal import remove_checkpoint

URL_SECONDS = 3600


class CheckpointService:
    """Reads and changes the records; the files are written by workers and only deleted here."""

    def __init__(self, store: Records, objects: ObjectStore, allowances: AllowanceService) -> None:
        self._records = store
        self._allowances = allowances
        self._objects = objects

    def list_all(self, caller: Caller, page: Page) -> dict[str, Any]:
        """Those of all runs of the projects where the caller may work, newest first."""
        within, now = projects(caller, "owned"), self._records.now()
        stored = self._records.list(Checkpoint.namespace)
        loaded = [(path, records.load(Checkpoint, fields)) for path, fields in stored]
        found = [(path, one) for path, one in loaded if one.owner in within and not one.is_expired(now)]
        shown, cursor = page.of(sorted(found, key=lambda pair: (-pair[1].created, pair[0])))
        return {"checkpoints": [checkpoint_view(path, one) for path, one in shown], "cursor": cursor}

    def describe_weights(self, path: ids.TinkerPath, caller: Caller) -> dict[str, Any]:
        """What a model has to be made as to load it: the body of weights_info. Raises NotFound."""
        checkpoint = load_checkpoint(self._records, path, caller)
        lora = {key: checkpoint.lora.get(key) for key in ("train_attn", "train_mlp", "train_unembed")}
        adapter = {} if checkpoint.full else {"lora_rank": checkpoint.lora["rank"], **lora}
        return {"base_model": checkpoint.base_model, "is_lora": not checkpoint.full, **adapter}

    def set_ttl(self, path: ids.TinkerPath, caller: Caller, ttl_seconds: int | None) -> None:
        """Counted from now; None keeps it for ever. Raises NotFound or BadRequest."""
        checkpoint = load_owned(self._records, Checkpoint, str(path), caller)
        check_ttl(ttl_seconds)
        self._allowances.take(caller, checkpoint.owner)
        now = self._records.now()
        expires = None if ttl_seconds is None else now + ttl_seconds
        self._audit(caller, checkpoint, path, "checkpoint_set_ttl", {"ttl_seconds": ttl_seconds})
        note(self._objects, checkpoint.prefix, "expires_at", now, expires)
        self._records.update(Checkpoint.namespace, str(path), {"expires_at": json.dumps(expires)})

    def publish(self, path: ids.TinkerPath, caller: Caller, *, public: bool) -> None:
        """Let everybody with a key read it, or not any more. Again is fine. Raises NotFound."""
        checkpoint = load_owned(self._records, Checkpoint, str(path), caller)
        self._allowances.take(caller, checkpoint.owner)
        self._audit(caller, checkpoint, path, "checkpoint_publish" if public else "checkpoint_unpublish")
        note(self._objects, checkpoint.prefix, "public", self._records.now(), public)
        self._records.update(Checkpoint.namespace, str(path), {"public": json.dumps(public)})

    def delete(self, path: ids.TinkerPath, caller: Caller) -> None:
        """The record and the manifest first, so that nobody finds half a checkpoint. Raises NotFound."""
        checkpoint = load_owned(self._records, Checkpoint, str(path), caller)
        self._audit(caller, checkpoint, path, "checkpoint_delete", urgent=True)
        self._records.delete(Checkpoint.namespace, str(path))
        remove_checkpoint(self._objects, checkpoint.prefix)

    def urls(self, path: ids.TinkerPath, caller: Caller) -> dict[str, Any]:
        """Signed URLs of an external checkpoint's files. Raises NotFound or BadRequest."""
        checkpoint = load_checkpoint(self._records, path, caller)
        if path.kind != "external_weights":
            raise BadRequest(f"{path} is not for download: save it with save_weights_external first")
        urls = {name: self._objects.presign(f"{checkpoint.prefix}/{name}", URL_SECONDS) for name in checkpoint.files}
        return {"urls": urls, "expires": timestamp(time.time() + URL_SECONDS)}

    def _audit(
        self,
        caller: Caller,
        checkpoint: Checkpoint,
        path: ids.TinkerPath,
        event: str,
        more: audit.About = MappingProxyType({}),
        *,
        urgent: bool = False,
    ) -> None:
        about = {"model_id": checkpoint.model_id, "tinker_path": str(path), **more}
        audit.note(self._records, caller, checkpoint.owner, event, about, urgent=urgent)
