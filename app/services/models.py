"""Models, which are training runs: created from a base model or a checkpoint, described, listed and deleted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from app import ids
from app.domain.accounts import Caller
from app.domain.ops import CreateModel, LoraSpec, ModelSpec
from app.domain.progress import Recorded
from app.domain.records import Model, Session
from app.errors import BadRequest, NotFound
from app.services.admission import AdmissionService
from app.services.base_models import BaseModels, trainer_role
from app.services.teardown import Teardown
from app.services.tenants import audit
from app.services.tenants.access import (
    ListedCheckpoint,
    Sources,
    list_run_checkpoints,
    load_owned,
    load_readable,
    missing,
    read_run,
)
from app.services.tenants.limits import QuotaService
from app.services.validation import (
    CRITIC,
    asked_role,
    check_loadable,
    check_lora,
    check_optimizer,
    check_same_role,
    exports_merged,
)
from app.services.views import (
    CHECKPOINT_TYPES,
    AccessScope,
    Page,
    checkpoint_view,
    owner_of,
    projects,
    texts,
    timestamp,
)
from app.stores.redis.records import RedisRecords, load
from app.stores.redis.types import Record


class ModelService:
    """Creates, describes, unloads and deletes models. A model is registered together with its seq 0, so its record
    always matches that call. A method that changes something also raises Forbidden for a viewer."""

    def __init__(
        self,
        records: RedisRecords,
        bases: BaseModels,
        admission: AdmissionService,
        teardown: Teardown,
        sources: Sources,
    ) -> None:
        self._records = records
        self._sources = sources
        self._bases = bases
        self._admission = admission
        self._teardown = teardown

    def create(self, caller: Caller, asked: Mapping[str, Any]) -> dict[str, str]:
        """Creates a fresh model, and returns a future. Raises NotFound (session), BadRequest, or Unavailable without a
        trainer yet."""
        check_optimizer(asked.get("optimizer_config"))
        model_id = ids.model_id(asked["session_id"], asked["model_seq_id"])
        config, critic = asked["lora_config"], asked_role(asked) == CRITIC
        lora = None if not config or config["rank"] == 0 else LoraSpec(**{"seed": ids.stable_seed(model_id), **config})
        if lora and critic:  # a critic has a value head, so the unembedding is not trained
            lora = replace(lora, train_unembed=False)
        return self._admit(caller, asked, CreateModel(ModelSpec(asked["base_model"], lora, critic)))

    def create_from(self, caller: Caller, asked: Mapping[str, Any]) -> dict[str, str]:
        """Creates a model from a checkpoint, and returns a future. A repeat is answered also when the checkpoint was
        deleted meanwhile. Raises NotFound (session, checkpoint) or BadRequest."""
        check_optimizer(asked.get("optimizer_config"))
        path = ids.TinkerPath.parse(asked["path"])
        try:
            checkpoint = self._sources.find(path, caller, asked.get("weights_access_token"))
        except NotFound:
            if (repeated := self._repeat(caller, asked, str(path))) is None:
                raise
            return repeated
        if asked.get("base_model", checkpoint.base_model) != checkpoint.base_model:
            raise BadRequest(f"{path} was trained on {checkpoint.base_model}, not on {asked['base_model'][:200]!r}")
        check_loadable(path, checkpoint, asked["optimizer"])
        role = asked_role(asked)
        if role is not None:
            check_same_role(path, checkpoint, critic=role == CRITIC)
        lora = None if checkpoint.full else LoraSpec(**checkpoint.lora)
        spec = ModelSpec(checkpoint.base_model, lora, checkpoint.critic)
        return self._admit(caller, asked, CreateModel(spec, str(path), asked["optimizer"], checkpoint.prefix))

    def describe(self, model_id: str, caller: Caller) -> dict[str, Any]:
        """The body of get_info. Raises NotFound."""
        model = load_readable(self._records, Model, model_id, caller)
        data = {"model_name": model.base_model, "tokenizer_id": self._bases.client_tokenizer(model.base_model)}
        arch = self._bases.arch(model.base_model)
        return {
            "model_id": model_id,
            "model_data": {**data, "arch": arch} if arch else data,
            "model_name": model.base_model,
            "is_lora": not model.full,
            **({"lora_rank": model.lora["rank"]} if model.lora else {}),
        }

    def unload(self, model_id: str, caller: Caller) -> dict[str, str]:
        """Asks the trainer to release the model from its memory, and returns a future that is done at once. Raises
        NotFound."""
        load_owned(self._records, Model, model_id, caller)
        self._teardown.unload(model_id)
        return {"request_id": ids.unload_id(model_id), "model_id": model_id}

    def delete(self, model_id: str, caller: Caller) -> None:
        """Ends a run: its waiting calls fail, and only its checkpoints stay. A repeat is harmless.

        Raises NotFound.
        """
        model = load_owned(self._records, Model, model_id, caller)
        once = f"delete {model_id}"
        audit.note(self._records, caller, model.owner, "run_delete", {"model_id": model_id}, once=once, urgent=True)
        self._teardown.end(model_id)

    def _repeat(self, caller: Caller, asked: Mapping[str, Any], source: str) -> dict[str, str] | None:
        """The future of a `create_from` that was admitted before; None for a new call. Raises NotFound (session)."""
        load_owned(self._records, Session, asked["session_id"], caller)
        model_id = ids.model_id(asked["session_id"], asked["model_seq_id"])
        request_id = self._admission.repeat_of_create(model_id, source, optimizer=asked["optimizer"])
        return {"request_id": request_id, "model_id": model_id} if request_id else None

    def _admit(self, caller: Caller, asked: Mapping[str, Any], op: CreateModel) -> dict[str, str]:
        session = load_owned(self._records, Session, asked["session_id"], caller)
        name = op.spec.base_model
        full = op.spec.lora is None
        if full and self._bases.settings(name).full is None:
            raise BadRequest(
                f"full fine-tuning of {name} is not offered here: give a lora_config with a rank from 1, or have the "
                "server started with trainers for it (base_models.full in its settings)"
            )
        trainer = self._bases.info(trainer_role(full=full), name)
        if op.spec.lora is not None:
            check_lora(op.spec.lora, self._bases.settings(name).max_rank, trainer)
            if not op.spec.critic:
                self._bases.check_sampled(op.spec.lora, name)
        model_id = ids.model_id(asked["session_id"], asked["model_seq_id"])
        model = Model(
            session.owner,
            asked["session_id"],
            name,
            time.time(),
            lora=asdict(op.spec.lora) if op.spec.lora else {},
            user_metadata=asked["user_metadata"],
            full=full,
            critic=op.spec.critic,
            key=caller.key_id,
            user=caller.user,
        )
        exports_merged(None, model)
        made = {"model_id": model_id, "base_model": name, **({"source_path": op.source} if op.source else {})}
        audited = audit.entry(caller, session.owner, "run_create", made)
        request_id = self._admission.admit(caller, model_id, model, 0, op, audited)
        return {"request_id": request_id, "model_id": model_id}


class RunService:
    """Describes and lists runs. A run consists of its Model record and the checkpoints under its id."""

    def __init__(self, records: RedisRecords, quotas: QuotaService) -> None:
        self._records, self._quotas = records, quotas

    def describe(self, model_id: str, caller: Caller, scope: AccessScope) -> dict[str, Any]:
        """A TrainingRun. The scope "accessible" includes another project's run that has a public checkpoint; of it the
        caller sees only what its public checkpoints tell. Raises NotFound."""
        try:
            stored = read_run(self._records, model_id, caller)
        except NotFound:
            public = [] if scope == "owned" else self._checkpoints(model_id, caller, newest=True)
            if not public:
                raise
            return _published_view(model_id, public)
        return {**_state(model_id, stored), **_saved(self._checkpoints(model_id, caller, newest=True))}

    def describe_state(self, model_id: str, caller: Caller) -> dict[str, Any]:
        """The TrainingRun of a run that the caller sees, without its checkpoints: a page that is loaded every few
        seconds does not read them. Raises NotFound."""
        return _state(model_id, read_run(self._records, model_id, caller))

    def list_runs(self, caller: Caller, scope: AccessScope, project: str | None, page: Page) -> dict[str, Any]:
        """The runs of a project or scope, newest first. Raises NotFound for a project that the caller does not see."""
        runs, cursor = self.list_states(caller, scope, project, page)
        found = [run["training_run_id"] for run in runs]
        checkpoints = list_run_checkpoints(self._records, found, caller, newest=True)
        views = [{**run, **_saved(made)} for run, made in zip(runs, checkpoints, strict=True)]
        return {"training_runs": views, "cursor": cursor}

    def list_states(
        self, caller: Caller, scope: AccessScope, project: str | None, page: Page
    ) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """The same runs without their checkpoints, and the cursor. Raises NotFound as `list_runs` does."""
        within = projects(caller, scope, project)
        found = sorted((-created, id_) for created, id_ in self._records.list_runs(within))
        shown, cursor = page.of(found)
        runs = self._records.read(Model.namespace, [id_ for _, id_ in shown])
        return [_state(id_, fields) for id_, fields in runs if fields and load(Model, fields).owner in within], cursor

    def record(self, caller: Caller, metrics: Mapping[str, Sequence[Recorded]]) -> None:
        """Keeps metrics that the caller recorded, by run, except those of runs that the caller does not see: one that
        is gone costs the others nothing. Raises NotFound if the caller sees none of the runs, Forbidden for one that
        the caller may only view, and TooManyRequests; then none is kept. Raises Unavailable."""
        owners: dict[str, str] = {}
        for model_id in metrics:
            with suppress(NotFound):
                owners[model_id] = load_owned(self._records, Model, model_id, caller).owner
        if not owners:
            raise missing(Model, next(iter(metrics)))
        self._quotas.take(caller, *owners.values())
        for model_id in owners:
            self._records.record(model_id, metrics[model_id])

    def list_checkpoints(self, model_id: str, caller: Caller) -> list[dict[str, Any]]:
        """A run's checkpoints, newest first; of another project's run only the public ones. Raises NotFound for a run
        of which the caller sees nothing."""
        found = self._checkpoints(model_id, caller)
        if not found:
            load_readable(self._records, Model, model_id, caller)
        return [checkpoint_view(path, one) for path, one in found]

    def _checkpoints(self, model_id: str, caller: Caller, *, newest: bool = False) -> list[ListedCheckpoint]:
        (found,) = list_run_checkpoints(self._records, [model_id], caller, newest=newest)
        return found


def _state(model_id: str, stored: Record) -> dict[str, Any]:
    """A TrainingRun without its checkpoints."""
    model = load(Model, stored)
    return {
        "training_run_id": model_id,
        "base_model": model.base_model,
        "project_id": model.owner,
        "model_owner": owner_of(model.user, model.owner),
        "is_lora": not model.full,
        "lora_rank": model.lora.get("rank"),
        "corrupted": model.state == "failed",
        "ended": "ended" in stored,
        "last_request_time": timestamp(float(stored.get("last_request", model.created * 1000)) / 1000),
        "user_metadata": texts(model.user_metadata),
    }


def _saved(checkpoints: Sequence[ListedCheckpoint]) -> dict[str, Any]:
    """The fields of a TrainingRun about its checkpoints."""
    return {
        "last_checkpoint": _newest(checkpoints, "training"),
        "last_sampler_checkpoint": _newest(checkpoints, "sampler"),
    }


def _published_view(model_id: str, public: Sequence[ListedCheckpoint]) -> dict[str, Any]:
    """A TrainingRun made of public checkpoints alone: the run's owner, metadata and state were not published."""
    newest = public[0][1]
    return {
        "training_run_id": model_id,
        "base_model": newest.base_model,
        "model_owner": "",  # the SDK requires the field
        "is_lora": not newest.full,
        "lora_rank": newest.lora.get("rank"),
        "last_request_time": timestamp(newest.created),
        "user_metadata": newest.user_metadata,
        **_saved(public),
    }


def _newest(checkpoints: Sequence[ListedCheckpoint], kind: str) -> dict[str, Any] | None:
    its = (checkpoint_view(path, one) for path, one in checkpoints if CHECKPOINT_TYPES[one.kind] == kind)
    return next(its, None)
