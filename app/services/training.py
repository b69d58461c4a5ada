"""Training calls: each is validated, turned into an Op and admitted. Custom losses are stored here until a batch names
one, and a batch gets the routes that a sampler stored.

Creating a custom loss runs nothing, so its future is just its record (app/services/polling.py).
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import prod
from typing import Any

import numpy as np

from app import ids
from app.domain import ops
from app.domain.accounts import Caller
from app.domain.checkpoints import CheckpointPrefix
from app.domain.losses import LOSSES, CustomLoss
from app.domain.ops import AdamParams, LoadWeights, LoraSpec, Op, OptimStep, Ragged, SaveWeights
from app.domain.records import Loss, Model, Sampler, Session
from app.domain.routes import SequenceRoutes, Span, none_of
from app.errors import BadRequest, NotFound, TooLarge
from app.services.admission import AdmissionService
from app.services.base_models import BaseModels, trainer_role
from app.services.tenants import audit
from app.services.tenants.access import Sources, load_owned, load_readable, sampler_exists
from app.services.tenants.limits import QuotaService
from app.services.validation import (
    check_adam,
    check_forward_backward,
    check_loadable,
    check_optimizer_params,
    check_recipients,
    check_same_kind,
    check_same_role,
    check_sampleable,
    check_sampled_role,
    check_ttl,
    exports_merged,
    in_range,
)
from app.settings import LimitSettings
from app.stores.objects.routes import RouteFiles
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords
from app.wire import custom_loss
from app.wire.bodies import check_batch, check_datums
from app.wire.forward_backward import Envelope

Promise = dict[str, str]
MAX_SPANS = 2**14
"""Most provenance spans of one call. Each may be a read from the object store."""
MAX_ROUTE_BYTES = 2**28
"""Most bytes of the routes of one call. A token of Qwen3-30B-A3B has 384 bytes, so this is 700,000 of its tokens."""


class TrainingService:
    """Validates and admits training calls. Every method returns a future, and raises NotFound for a model that the
    caller does not see, Forbidden for one that the caller may only view, BadRequest, or an error of
    AdmissionService."""

    def __init__(
        self,
        records: RedisRecords,
        bases: BaseModels,
        admission: AdmissionService,
        custom_losses: CustomLossService,
        limits: LimitSettings,
        sources: Sources,
        routes: RouteService,
    ) -> None:
        self._limits = limits
        self._records = records
        self._bases = bases
        self._admission = admission
        self._custom_losses = custom_losses
        self._sources = sources
        self._routes = routes

    def forward_backward(self, caller: Caller, envelope: Envelope) -> Promise:
        model = load_owned(self._records, Model, envelope.model_id, caller)
        in_range("seq_id", envelope.seq, 1, ids.MAX_SEQ)
        info = self._bases.info(trainer_role(full=model.full), model.base_model)
        check_datums(envelope.datums, self._limits)
        op = envelope.decode(partial(self._custom_losses.find, caller))
        check_batch(op.batch, self._limits)
        check_forward_backward(op, info, critic=model.critic)
        # The journal stores every setting explicitly, so that a changed default cannot change a replay.
        op = replace(op, loss_config={**LOSSES[op.loss_fn].config, **op.loss_config})
        if self._bases.settings(model.base_model).router_replay:
            # The routes' files are soon gone, so the journal stores the routes too.
            try:
                routes = self._routes.find(caller, model.base_model, op.batch.tokens, envelope.spans())
            except BadRequest as error:
                return self._repeat(envelope.model_id, envelope.seq, op, error)
            op = replace(op, batch=replace(op.batch, routes=routes))
        return self._admit(caller, model, envelope.model_id, envelope.seq, op)

    def optim_step(self, caller: Caller, asked: Mapping[str, Any]) -> Promise:
        model = load_owned(self._records, Model, asked["model_id"], caller)
        check_optimizer_params(asked.get("optimizer_params"))
        params = AdamParams(**asked["adam_params"])
        check_adam(params)
        return self._admit(caller, model, asked["model_id"], asked["seq_id"], OptimStep(params))

    def save_weights(self, caller: Caller, asked: Mapping[str, Any]) -> Promise:
        model = load_owned(self._records, Model, asked["model_id"], caller)
        return self._save(caller, model, asked, "weights")

    def save_weights_external(self, caller: Caller, asked: Mapping[str, Any]) -> Promise:
        model = load_owned(self._records, Model, asked["model_id"], caller)
        merged = exports_merged(asked.get("format"), model)
        recipients = check_recipients(asked.get("age_encryption_recipients") or ())
        return self._save(caller, model, asked, "external_weights", merged=merged, recipients=recipients)

    def save_weights_for_sampler(self, caller: Caller, asked: Mapping[str, Any]) -> Promise:
        """Saves weights for sampling: persistent under `path`, or ephemeral under a new sampling session. Raises
        BadRequest for a critic."""
        model = load_owned(self._records, Model, asked["model_id"], caller)
        check_sampled_role(asked["model_id"], critic=model.critic)
        if asked.get("path") is not None:
            return self._save(caller, model, asked, "sampler_weights")
        if asked.get("sampling_session_seq_id") is None:
            raise BadRequest("save_weights_for_sampler needs either path or sampling_session_seq_id")
        check_sampleable(self._bases.settings(model.base_model), full=model.full)
        if model.lora:
            self._bases.check_sampled(LoraSpec(**model.lora), model.base_model)
        session = ids.sampling_session_id(model.session_id, asked["sampling_session_seq_id"])
        self._check_free(session, asked)
        name, inflight = f"ephemeral-{asked['seq_id']}", asked["kind"] == "inflight"
        op = SaveWeights("sampler_weights", name, sampling_session_id=session, inflight=inflight)
        return self._admit(caller, model, asked["model_id"], asked["seq_id"], op)

    def load_weights(self, caller: Caller, asked: Mapping[str, Any]) -> Promise:
        """Loads a checkpoint into the model. A missing checkpoint is a BadRequest, because the call is final and its
        seq is consumed. A repeat is answered also when the checkpoint was deleted meanwhile."""
        model = load_owned(self._records, Model, asked["model_id"], caller)
        path = ids.TinkerPath.parse(asked["path"])
        try:
            checkpoint = self._sources.find(path, caller, asked.get("weights_access_token"))
        except NotFound as error:
            op = LoadWeights(str(path), asked["optimizer"])
            return self._repeat(asked["model_id"], asked["seq_id"], op, error)
        check_loadable(path, checkpoint, asked["optimizer"])
        if checkpoint.base_model != model.base_model:
            raise BadRequest(f"{path} was trained on {checkpoint.base_model}, but this model on {model.base_model}")
        check_same_role(path, checkpoint, critic=model.critic)
        check_same_kind(path, checkpoint, full=model.full)
        op = LoadWeights(str(path), asked["optimizer"], checkpoint.prefix)
        return self._admit(caller, model, asked["model_id"], asked["seq_id"], op)

    def _save(
        self,
        caller: Caller,
        model: Model,
        asked: Mapping[str, Any],
        kind: str,
        *,
        merged: bool = False,
        recipients: tuple[str, ...] = (),
    ) -> Promise:
        check_ttl(asked.get("ttl_seconds"))
        op = SaveWeights(
            kind,
            ids.check_name(asked["path"]),
            asked.get("ttl_seconds"),
            asked.get("overwrite", False),
            asked.get("user_metadata") or {},
            merged=merged,
            recipients=recipients,
        )
        model_id, seq = asked["model_id"], asked["seq_id"]
        saved = {"model_id": model_id, "tinker_path": str(ids.TinkerPath(model_id, kind, op.name))}
        return self._admit(caller, model, model_id, seq, op, audit.entry(caller, model.owner, "checkpoint_save", saved))

    def _check_free(self, sampler_id: str, asked: Mapping[str, Any]) -> None:
        """Raises BadRequest if a sampling session with this id exists and was not created by this same call."""
        there = self._records.find(Sampler, sampler_id)
        place = CheckpointPrefix.parse(there.prefix) if there else None
        if there and (place is None or (place.model_id, place.seq) != (asked["model_id"], asked["seq_id"])):
            raise sampler_exists(asked["sampling_session_seq_id"])

    def _repeat(self, model_id: str, seq: int, op: Op, missing: Exception) -> Promise:
        """The future of the call if it was admitted before. If the call is new, raises BadRequest with the text of
        `missing`."""
        request_id = self._admission.repeat_of(model_id, seq, op)
        if request_id is None:
            raise BadRequest(str(missing)) from None
        return {"request_id": request_id, "model_id": model_id}

    def _admit(self, caller: Caller, model: Model, model_id: str, seq: int, op: Op, audited: str = "") -> Promise:
        request_id = self._admission.admit(caller, model_id, model, seq, op, audited)
        return {"request_id": request_id, "model_id": model_id}


MOST_LOSS_BYTES = 16 * 2**20
"""Most bytes of a session's custom losses, which stay in the state server's memory until the session is removed. A loss
takes 1 to 3 KB, and at most 170 KB."""


class CustomLossService:
    """Stores custom losses. A loss never changes: its id consists of the session and the number that the client gave
    it. `create` also raises Forbidden for a viewer, and the errors of QuotaService."""

    def __init__(self, records: RedisRecords, quotas: QuotaService) -> None:
        self._records, self._quotas = records, quotas

    def create(self, caller: Caller, asked: Mapping[str, Any]) -> dict[str, str]:
        """Stores a custom loss, and returns a future of its id; a repeat returns the same id.

        Raises NotFound (session), BadRequest for a graph that is not allowed, a number already used for another loss,
        or more than MOST_LOSS_BYTES of losses in the session, and Unavailable while there is no room.
        """
        session_id, seq = asked["session_id"], asked["custom_loss_seq_id"]
        session = load_owned(self._records, Session, session_id, caller)
        loss = custom_loss.parse(asked["name"], asked["inputs"], asked["graph"])
        content = base64.b64encode(ops.encode(loss)).decode()
        loss_id = ids.loss_id(session_id, seq)
        if self._records.get(Loss.namespace, loss_id) is None:
            self._quotas.take(caller, session.owner)
        record = Loss(session.owner, session_id, time.time(), content)
        fresh = self._put(loss_id, record)
        if not fresh and not _is_same(load_readable(self._records, Loss, loss_id, caller).content, loss):
            raise BadRequest(f"custom_loss_seq_id {seq} was used before with other content; use a new one")
        return {"request_id": loss_id}

    def _put(self, loss_id: str, record: Loss) -> bool:
        try:
            return self._records.put_loss(loss_id, record, MOST_LOSS_BYTES)
        except TooLarge as error:
            raise BadRequest(
                f"{error}: use one loss for many batches, pass what changes as an input, or begin a new session"
            ) from None

    def find(self, caller: Caller, loss_id: str) -> CustomLoss:
        """The custom loss with this id. Raises BadRequest if it is missing: the call that names it is final, and its
        seq is consumed."""
        try:
            record = load_readable(self._records, Loss, loss_id, caller)
        except NotFound as error:
            raise BadRequest(str(error)) from None
        loss: CustomLoss = ops.decode(base64.b64decode(record.content))
        return loss


class RouteService:
    """Finds the routes of a batch's tokens that were sampled here: the experts that the sampler chose for them."""

    def __init__(self, records: RedisRecords, oplog: RedisOpLog, files: RouteFiles) -> None:
        self._records, self._oplog, self._files = records, oplog, files

    def find(self, caller: Caller, base_model: str, tokens: Ragged, spans: Sequence[Sequence[Span]]) -> Ragged | None:
        """The routes of each datum's tokens, none_of where a token has none. None where no span names a token.

        Raises BadRequest for a sequence that has no routes or that the caller may not read, with the same text, for
        spans that do not fit the datum, for more than MAX_SPANS, and for routes of more than MAX_ROUTE_BYTES.
        """
        count = sum(len(datum) for datum in spans)
        if count > MAX_SPANS:
            raise BadRequest(f"the batch has {count} model_input_spans, more than {MAX_SPANS}; send fewer datums")
        placed = sorted(_placed(tokens, spans), key=lambda part: part.span.sequence_id)
        if not placed:
            return None
        blank = self._read(caller, base_model, placed[0].span.sequence_id).prompt_routes[:0]
        size = len(tokens.values) * prod(blank.shape[1:]) * blank.itemsize
        if size > MAX_ROUTE_BYTES:
            raise BadRequest(
                f"the routes of this batch take {size} bytes, more than {MAX_ROUTE_BYTES}; send fewer datums"
            )
        routes = [np.full((len(own), *blank.shape[1:]), none_of(blank.dtype), blank.dtype) for own in tokens]
        for sequence_id, parts in groupby(placed, lambda part: part.span.sequence_id):  # each is read once
            sequence = self._read(caller, base_model, sequence_id)
            for part in parts:
                part.fill(sequence, routes[part.datum])
        return Ragged.of(routes, blank.dtype)

    def _read(self, caller: Caller, base_model: str, sequence_id: str) -> SequenceRoutes:
        try:
            sampler = load_readable(self._records, Sampler, ids.sampler_of(sequence_id), caller)
            if sampler.base_model == base_model:
                attempt = self._oplog.routes_of(ids.request_of(sequence_id))
                return self._files.find(sequence_id, attempt)
        except NotFound:
            pass
        raise BadRequest(
            f"sequence {sequence_id[:200]!r} has no routes: it is unknown, older than a day, or was not sampled from "
            f"{base_model} with router_replay. Leave its spans out to train on it without them"
        )


@dataclass(frozen=True, slots=True)
class _PlacedSpan:
    """A span, and the tokens of a datum from `start` on that it names."""

    datum: int
    start: int
    tokens: np.ndarray
    span: Span

    def fill(self, sequence: SequenceRoutes, found: np.ndarray) -> None:
        """Writes the span's routes into the datum's. Raises BadRequest if its tokens are not the datum's."""
        theirs, routes = sequence.part(self.span)
        if routes.shape[1:] != found.shape[1:] or not np.array_equal(theirs, self.tokens):
            span = self.span
            raise BadRequest(
                f"datum {self.datum}: its tokens from {self.start} to {self.start + span.length} are not those from "
                f"{span.offset} to {span.offset + span.length} of sequence {span.sequence_id[:200]!r}; send the spans "
                "of these tokens, or none"
            )
        found[self.start : self.start + len(routes)] = routes


def _is_same(content: str, loss: CustomLoss) -> bool:
    """True if the stored content is this loss. Its budget may be an earlier one: it was stored before an upgrade."""
    stored: CustomLoss = ops.decode(base64.b64decode(content))
    return bool(ops.encode(replace(stored, budget=loss.budget)) == ops.encode(loss))


def _placed(tokens: Ragged, spans: Sequence[Sequence[Span]]) -> Iterator[_PlacedSpan]:
    """Yields the place of each span that has tokens. A datum without spans has none. Raises BadRequest for spans that
    do not cover their datum."""
    for i, (own, cover) in enumerate(zip(tokens, spans, strict=True)):
        covered = sum(span.length for span in cover)
        if cover and (covered != len(own) or any(min(span.offset, span.length) < 0 for span in cover)):
            raise BadRequest(f"datum {i}: its model_input_spans do not cover its {len(own)} tokens, each once")
        start = 0
        for span in cover:
            if span.length:
                yield _PlacedSpan(i, start, own[start : start + span.length], span)
            start += span.length
