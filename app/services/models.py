"""Models (training runs): made from a base or from a checkpoint, and described."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app import ids
from app.domain.identity import Caller
from app.domain.ops import CreateModel, LoraSpec, ModelSpec
from app.domain.records import Model, Session
from app.errors import BadRequest
from app.services import audit
from app.services.admission import AdmissionService
from app.services.base_models import BaseModels, trainer_role
from app.services.checks.exports import check_loadable, check_same_role, exports_merged
from app.services.checks.models import CRITIC, asked_role, check_lora, check_optimizer, check_sampled
from app.services.endings import Endings
from app.services.ownership import load_owned, load_readable
from app.services.sources import Sources
from app.stores.interfaces import Records


class ModelService:
    """A model is registered together with its seq 0, so that what is known of it is what that call said."""

    def __init__(
        self, store: Records, bases: BaseModels, admission: AdmissionService, endings: Endings, sources: Sources
    ) -> None:
        self._records = store
        self._sources = sources
        self._bases = bases
        self._admission = admission
        self._endings = endings

    def create(self, caller: Caller, asked: Mapping[str, Any]) -> dict[str, str]:
        """A promise of a fresh model. Raises NotFound (session), BadRequest, or Unavailable without a trainer yet."""
        check_optimizer(asked.get("optimizer_config"))
        model_id = ids.model_id(asked["session_id"], asked["model_seq_id"])
        config, critic = asked["lora_config"], asked_role(asked) == CRITIC
        lora = None if not config or config["rank"] == 0 else LoraSpec(**{"seed": ids.stable_seed(model_id), **config})
        if lora and critic:  # which has another head than the one that would be trained
            lora = replace(lora, train_unembed=False)
        return self._admit(caller, asked, CreateModel(ModelSpec(asked["base_model"], lora, critic)))

    def create_from(self, caller: Caller, asked: Mapping[str, Any]) -> dict[str, str]:
        """A promise of a model that starts as a checkpoint. Raises NotFound (session, checkpoint) or BadRequest."""
        check_optimizer(asked.get("optimizer_config"))
        path = ids.TinkerPath.parse(asked["path"])
        checkpoint = self._sources.find(path, caller, asked.get("weights_access_token"))
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
        """A promise, kept at once: its trainer has been told that it need not stay in memory. Raises NotFound."""
        load_owned(self._records, Model, model_id, caller)
        self._endings.unload(model_id)
        return {"request_id": ids.unload_id(model_id), "model_id": model_id}

    def delete(self, model_id: str, caller: Caller) -> None:
        """End a run: its waiting calls fail, and nothing is left of it but its checkpoints. Again is fine.

        Raises NotFound.
        """
        model = load_owned(self._records, Model, model_id, caller)
        audit.note(self._records, caller, model.owner, "run_delete", {"model_id": model_id}, urgent=True)
        self._endings.end(model_id)

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
                check_sampled(op.spec.lora, trainer, self._bases.known("sampler", name))
        model_id = ids.model_id(asked["session_id"], asked["model_seq_id"])
        model = Model(
            session.owner,
            asked["session_id"],
            name,
            time.time(),
            user_metadata=asked["user_metadata"],
            full=full,
            critic=op.spec.critic,
            key=caller.key_id,
        )
        exports_merged(None, model)
        made = {"model_id": model_id, "base_model": name, **({"source_path": op.source} if op.source else {})}
        audited = audit.entry(caller, session.owner, "run_create", made)
        request_id = self._admission.admit(caller, model_id, model, 0, op, audited)
        return {"request_id": request_id, "model_id": model_id}
