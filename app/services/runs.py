"""Training runs as those see them who may: what each is, and lists of them."""

from __future__ import annotations

from typing import Any

from app import ids
from app.domain import records
from app.domain.identity import Caller
from app.domain.records import Checkpoint, Model
from app.errors import NotFound
from app.services.lists import Page, Scope, projects
from app.services.ownership import load_readable, may_read
from app.services.views import checkpoint_view, texts, timestamp
from app.stores.interfaces import Record, Records


class RunService:
    """A run is its Model record, and the checkpoints below its id."""

    def __init__(self, store: Records) -> None:
        self._records = store

    def describe(self, model_id: str, caller: Caller, scope: Scope) -> dict[str, Any]:
        """A TrainingRun; "accessible" is also one of somebody else that has a public checkpoint. Raises NotFound."""
        try:
            load_readable(self._records, Model, model_id, caller)
        except NotFound:
            if scope == "owned" or not self._checkpoints(model_id, caller):
                raise
        stored = self._records.get(Model.namespace, model_id)
        if stored is None:  # a public checkpoint may outlive all else
            raise NotFound(f"model {model_id[:200]!r} does not exist")
        return self._view(model_id, stored, caller)

    def list_runs(self, caller: Caller, scope: Scope, project: str | None, page: Page) -> dict[str, Any]:
        """Newest first. Raises NotFound for a project the caller does not see."""
        within = projects(caller, scope, project)
        stored = [(id_, fields, records.load(Model, fields)) for id_, fields in self._records.list(Model.namespace)]
        found = [run for run in stored if run[2].owner in within]
        shown, cursor = page.of(sorted(found, key=lambda run: (-run[2].created, run[0])))
        return {"training_runs": [self._view(id_, fields, caller) for id_, fields, _ in shown], "cursor": cursor}

    def list_checkpoints(self, model_id: str, caller: Caller) -> list[dict[str, Any]]:
        """A run's checkpoints, newest first; of somebody else's run the public ones. Raises NotFound for a run of which
        the caller sees nothing."""
        found = self._checkpoints(model_id, caller)
        if not found:
            load_readable(self._records, Model, model_id, caller)
        return found

    def _view(self, model_id: str, stored: Record, caller: Caller) -> dict[str, Any]:
        model = records.load(Model, stored)
        found = self._checkpoints(model_id, caller)
        return {
            "training_run_id": model_id,
            "base_model": model.base_model,
            "model_owner": model.owner,
            "is_lora": not model.full,
            "lora_rank": model.lora.get("rank"),
            "corrupted": model.state == "failed",
            "ended": "ended" in stored,
            "last_request_time": timestamp(float(stored.get("last_request", model.created * 1000)) / 1000),
            "last_checkpoint": _newest(found, "training"),
            "last_sampler_checkpoint": _newest(found, "sampler"),
            "user_metadata": texts(model.user_metadata),
        }

    def _checkpoints(self, model_id: str, caller: Caller) -> list[dict[str, Any]]:
        now = self._records.now()
        stored = self._records.list(Checkpoint.namespace, ids.checkpoint_prefix(model_id))
        loaded = [(path, records.load(Checkpoint, fields)) for path, fields in stored]
        seen = [(path, found) for path, found in loaded if may_read(caller, found) and not found.is_expired(now)]
        return [checkpoint_view(path, found) for path, found in sorted(seen, key=lambda pair: -pair[1].created)]


def _newest(checkpoints: list[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    return next((found for found in checkpoints if found["checkpoint_type"] == kind), None)
