"""Admission: turns a checked Op into a journaled Op, and charges every call against its caller's limits. All work
enters the system here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import redis

from app import ids
from app.dispatch import CATCH_UP, Dispatcher, queue_for, sample_queue, train_queue
from app.domain import ops
from app.domain.accounts import Caller
from app.domain.limits import Charge, Payer
from app.domain.ops import CreateModel, ForwardBackward, LoadWeights, LoraSpec, ModelSpec, Op, SaveWeights, as_asked
from app.domain.records import Model, Sampler
from app.domain.sampling import SampleRequest
from app.errors import Forbidden, NotFound, NotReplicated
from app.services.tenants.access import load_owned
from app.services.tenants.limits import LimitsFinder
from app.services.tenants.spending import Spending
from app.settings import Settings
from app.stores.disk import Disk
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords, dump
from app.stores.redis.types import Admission, QueueBounds, RefusalKind, UnreplicatedAdmission
from app.telemetry import ADMISSIONS, ADMIT_SECONDS
from app.tracing import requests as traced

log = logging.getLogger(__name__)
_BEAT_S = 3.0
_LIFE_S = 10.0
# Between two looks, a disk that takes 500 MB/s fills by half of the default engine.free_disk_bytes.
_LOOK_S, _SHORT_S = 0.5, 3.0


class AdmissionService:
    """Journals an Op first and dispatches it second. A lost dispatch delays the Op for a moment, but never loses it."""

    def __init__(
        self,
        oplog: RedisOpLog,
        records: RedisRecords,
        dispatcher: Dispatcher,
        limits: LimitsFinder,
        settings: Settings,
        spending: Spending,
    ) -> None:
        self._oplog = oplog
        self._limits = limits
        self._spending = spending
        self._settings = settings
        self._records = records
        self._dispatcher = dispatcher

    def admit(self, caller: Caller, model_id: str, model: Model, seq: int, op: Op, audited: str = "") -> str:
        """Admits a training Op, and returns the request id of its future; a repeat returns the same id. The Op that
        creates a model also registers the model. `audited`: the Op's audit log entry, written in the same step.

        Raises BadRequest for a seq already used for another call, Unavailable while there is no room or when the
        checkpoint that the Op loads was deleted or overwritten since it was read, and TooManyRequests or LimitReached
        for a limit of the project or of the caller's key.
        """
        started = time.monotonic()
        payload = ops.encode(op)
        identity = _identity(op, payload)
        new = dump(model) if isinstance(op, CreateModel) else None
        charge = _charge(op, self._limits.payers(caller, model.owner))
        if isinstance(op, ForwardBackward):
            charge = self._spends(charge, model.owner)
        trace = traced.context()
        queue = train_queue(model.base_model, full=model.full)
        announce = partial(self._announce, started, op.kind, model_id, model.owner, seq, queue)
        with _announcing_unreplicated(announce):
            admission = self._oplog.admit(
                model_id, seq, op.kind, payload, identity, new, charge, audited, trace, _loads(op)
            )
        announce(admission)
        return admission.request_id

    def repeat_of(self, model_id: str, seq: int, op: Op) -> str | None:
        """The request id of the call with this seq if it is the same call, whatever the server looked up for it at that
        time; else None."""
        request_id = ids.request_id(model_id, seq)
        return request_id if self._oplog.digest(request_id) == _identity(op, ops.encode(op)) else None

    def repeat_of_create(self, model_id: str, source: str, *, optimizer: bool) -> str | None:
        """The request id of the call that created the model, if it did so from this checkpoint; else None. The
        checkpoint may be gone, and the Op too: the model's record has all that was read from the checkpoint."""
        model = self._records.find(Model, model_id)
        if model is None:
            return None
        lora = LoraSpec(**model.lora) if model.lora else None
        spec = ModelSpec(model.base_model, lora, model.critic)
        return self.repeat_of(model_id, 0, CreateModel(spec, source, optimizer))

    def admit_sample(self, caller: Caller, sampler_id: str, sampler: Sampler, seq: int, request: SampleRequest) -> str:
        """Admits a sampling request, and returns the request id of its future; a repeat returns the same id.

        Raises BadRequest for a seq already used for another call and for more tokens than the queue ever accepts,
        TooManyRequests while the queue is full or a limit of the project or of the caller's key is reached, and
        Unavailable while there is no room.
        """
        started = time.monotonic()
        payload = ops.encode(request)
        queue = sample_queue(sampler.base_model, full=sampler.full)
        request_id = ids.request_id(sampler_id, seq)
        identity, bounds, tokens = ops.digest(payload), self._bounds(sampler), request.most_tokens
        base = self._settings.base_model(sampler.base_model)
        charge = Charge(
            self._limits.payers(caller, sampler.owner),
            tokens,
            request.num_samples,
            stores=base is not None and base.router_replay,
        )
        charge = self._spends(charge, sampler.owner)
        announce = partial(self._announce, started, "sample", sampler_id, sampler.owner, seq, queue)
        with _announcing_unreplicated(announce):
            admission = self._oplog.admit_sample(
                request_id,
                sampler_id,
                sampler.owner,
                queue,
                payload,
                identity,
                tokens,
                bounds,
                request.num_samples,
                charge,
                traced.context(),
            )
        announce(admission)
        return request_id

    def refuse(self, model_id: str, seq: int, caller: Caller, reason: str, kind: RefusalKind) -> bool:
        """Consumes the seq of a call that got a final 4xx, so that later calls do not wait for it. Does nothing if the
        caller was not allowed to make the call, if too many earlier calls are missing, or if the run has ended. Returns
        False, without a change, if a call was admitted under the seq. Raises Unavailable while the state server has no
        room."""
        try:
            model = load_owned(self._records, Model, model_id, caller)
        except (NotFound, Forbidden):
            return True
        if not 1 <= seq <= ids.MAX_SEQ:
            return True
        request_id = ids.request_id(model_id, seq)
        if not self._oplog.refuse(model_id, seq, reason, kind):
            return self._oplog.digest(request_id) is None
        log.info("refused", extra={"request_id": request_id, "model_id": model_id, "seq": seq})
        # The calls that wait behind it were dispatched and turned away once already.
        queue = train_queue(model.base_model, full=model.full)
        self._dispatcher.send(CATCH_UP, request_id, model_id, queue)
        return True

    def _spends(self, charge: Charge, project: str) -> Charge:
        """The charge of a call that needs a part of the project's budget. An optim_step needs none: otherwise a budget
        that ends between it and its batches would lose their gradients."""
        if self._limits.project(project).monthly_budget is None:
            return charge
        return replace(charge, spends=True, spent=self._spending.this_month(project) or 0.0)

    def _bounds(self, sampler: Sampler) -> QueueBounds | None:
        base = self._settings.base_model(sampler.base_model)
        section = base and (base.full_sampler if sampler.full else base.sampler)
        return QueueBounds(section.queue_requests, section.queue_tokens) if section else None

    def _announce(
        self, started: float, kind: str, parent_id: str, project: str, seq: int, queue: str, admission: Admission
    ) -> None:
        """Announces a fresh call, and dispatches it unless it is throttled. Does nothing for a repeat."""
        if not admission.fresh:
            return
        request_id = admission.request_id
        ADMISSIONS.labels(kind).inc()
        self._dispatcher.events.admitted(request_id, kind, project)
        traced.admitted(request_id, kind, project)
        log.info("admitted %s", kind, extra={"request_id": request_id, "model_id": parent_id, "seq": seq})
        if not admission.throttled:
            self._dispatcher.send(kind, request_id, parent_id, queue_for(queue, admission.node))
        ADMIT_SECONDS.labels(kind).observe(time.monotonic() - started)


@contextlib.contextmanager
def _announcing_unreplicated(announce: Callable[[Admission], None]) -> Iterator[None]:
    """Announces a call that was journaled, but that too few replicas have, and raises NotReplicated. Its repeat is not
    announced."""
    try:
        yield
    except UnreplicatedAdmission as error:
        announce(error.admission)
        # Clients know the name of this class, which docs/errors.md has.
        raise NotReplicated(str(error)) from None


def _identity(op: Op, payload: bytes) -> str:
    """The digest that is equal for a repeat of the call. `payload`: the encoded Op."""
    asked = as_asked(op)
    return ops.digest(payload if asked is op else ops.encode(asked))


def _loads(op: Op) -> tuple[str, str] | None:
    """The path of the checkpoint that the Op loads, and the prefix of its files."""
    return (op.source, op.prefix) if isinstance(op, CreateModel | LoadWeights) and op.source else None


def _charge(op: Op, payers: tuple[Payer, ...]) -> Charge:
    """The charge of an Op, without its part of a budget."""
    tokens = int(op.batch.tokens.values.size) if isinstance(op, ForwardBackward) else 0
    models, stores = int(isinstance(op, CreateModel)), isinstance(op, SaveWeights)
    return Charge(payers, tokens, models=models, stores=stores)


def beat_for_ever(oplog: RedisOpLog) -> None:
    """Sends the heartbeat of this API process from a thread, as long as the process lives. The heartbeat may fail:
    while Redis is away or full, no calls can be accepted."""

    def loop() -> None:
        while True:
            with contextlib.suppress(redis.RedisError, OSError):
                oplog.take_calls(_LIFE_S)
            time.sleep(_BEAT_S)

    threading.Thread(target=loop, name="heartbeat", daemon=True).start()


def watch_for_ever(oplog: RedisOpLog, disks: Sequence[Disk]) -> None:
    """Has new calls refused while one of the disks is nearly full, from a thread, as long as the process lives."""

    def loop() -> None:
        while True:
            with contextlib.suppress(redis.RedisError, OSError):
                if shortages := [shortage for disk in disks if (shortage := disk.shortage())]:
                    oplog.take_none(shortages[0], _SHORT_S)
            time.sleep(_LOOK_S)

    threading.Thread(target=loop, name="disks", daemon=True).start()
