"""Admission: turns a checked Op into a journaled Op, and charges every call against its caller's limits. All work
enters the system here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

import redis

from app import ids
from app.dispatch import CATCH_UP, Dispatcher, direct_queue, sample_queue, train_queue
from app.domain import ops
from app.domain.accounts import Caller, Key, Project
from app.domain.limits import KEY, PROJECT, Charge, Limits, Payer
from app.domain.ops import CreateModel, ForwardBackward, LoraSpec, ModelSpec, Op, SaveWeights, as_asked
from app.domain.records import Model, Sampler, Upload
from app.domain.sampling import SampleRequest
from app.errors import Forbidden, NotFound
from app.services.tenants.access import load_owned
from app.services.tenants.spending import Spending
from app.services.views import check_seen
from app.settings import Settings
from app.stores.disk import Disk
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.limits import RedisQuotas
from app.stores.redis.records import RedisRecords, dump
from app.stores.redis.types import Admission, QueueBounds, RefusalKind, UnreplicatedAdmission
from app.telemetry import ADMISSIONS, ADMIT_SECONDS
from app.tracing import requests as traced

log = logging.getLogger(__name__)
MAX_SEQ = 2**31 - 1
_BEAT_S = 3.0
_LIFE_S = 10.0
# Between two looks, a disk that takes 500 MB/s fills by half of the default engine.free_disk_bytes.
_LOOK_S, _SHORT_S = 0.5, 3.0

RESERVED_S = 7200
"""The time for which the room of an upload is reserved."""
# Bytes a second, at which files of any size are stored. A model of 600 GB takes hours.
_SLOWEST = 10**7

_CACHED_S = 5.0
_NONE = Limits()
A = TypeVar("A", Project, Key)


class AdmissionService:
    """Journals an Op first and dispatches it second. A lost dispatch delays the Op for a moment, but never loses it."""

    def __init__(
        self,
        oplog: RedisOpLog,
        store: RedisRecords,
        dispatcher: Dispatcher,
        limits: LimitsOf,
        settings: Settings,
        spending: Spending,
    ) -> None:
        self._oplog = oplog
        self._limits = limits
        self._spending = spending
        self._settings = settings
        self._records = store
        self._dispatcher = dispatcher

    def admit(self, caller: Caller, model_id: str, model: Model, seq: int, op: Op, audited: str = "") -> str:
        """Admits a training Op, and returns the request id of its future; a repeat returns the same id. The Op that
        creates a model also registers the model. `audited`: the Op's audit log entry, written in the same step.

        Raises BadRequest for a seq already used for another call, Unavailable while there is no room, and
        TooManyRequests or LimitReached for a limit of the project or of the caller's key.
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
            admission = self._oplog.admit(model_id, seq, op.kind, payload, identity, new, charge, audited, trace)
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
        identity, bounds, tokens = ops.digest(payload), self._bounds(sampler), _most_tokens(request)
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

    def refuse(self, model_id: str, seq: int, caller: Caller, reason: str, kind: RefusalKind) -> None:
        """Consumes the seq of a call that got a final 4xx, so that later calls do not wait for it. Does nothing if the
        caller was not allowed to make the call. Raises Unavailable while the state server has no room."""
        try:
            model = load_owned(self._records, Model, model_id, caller)
        except (NotFound, Forbidden):
            return
        if 1 <= seq <= MAX_SEQ and self._oplog.refuse(model_id, seq, reason, kind):
            request_id = ids.request_id(model_id, seq)
            log.info("refused", extra={"request_id": request_id, "model_id": model_id, "seq": seq})
            # The calls that wait behind it were dispatched and turned away once already.
            queue = train_queue(model.base_model, full=model.full)
            self._dispatcher.send(CATCH_UP, request_id, model_id, queue)

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
            queue = direct_queue(queue, admission.node) if admission.node else queue
            self._dispatcher.send(kind, request_id, parent_id, queue)
        ADMIT_SECONDS.labels(kind).observe(time.monotonic() - started)


@contextlib.contextmanager
def _announcing_unreplicated(announce: Callable[[Admission], None]) -> Iterator[None]:
    """Announces a call that was journaled, but that too few replicas have. Its repeat is not announced."""
    try:
        yield
    except UnreplicatedAdmission as error:
        announce(error.admission)
        raise


def _identity(op: Op, payload: bytes) -> str:
    """The digest that is equal for a repeat of the call. `payload`: the encoded Op."""
    asked = as_asked(op)
    return ops.digest(payload if asked is op else ops.encode(asked))


def _charge(op: Op, payers: tuple[Payer, ...]) -> Charge:
    """The charge of an Op."""
    tokens = int(op.batch.tokens.values.size) if isinstance(op, ForwardBackward) else 0
    models, stores = int(isinstance(op, CreateModel)), isinstance(op, SaveWeights)
    return Charge(payers, tokens, models=models, stores=stores)


def _most_tokens(request: SampleRequest) -> int:
    return len(request.prompt) + request.num_samples * request.max_tokens


def beat_for_ever(oplog: RedisOpLog) -> None:
    """Sends the heartbeat of this API process from a thread, as long as the process lives. The heartbeat may fail:
    while Redis is away or full, no calls can be accepted."""

    def loop() -> None:
        while True:
            with contextlib.suppress(redis.RedisError, OSError):
                oplog.take_calls(_LIFE_S)
            time.sleep(_BEAT_S)

    threading.Thread(target=loop, name="presence", daemon=True).start()


def watch_for_ever(oplog: RedisOpLog, disks: Sequence[Disk]) -> None:
    """Has new calls refused while one of the disks is nearly full, from a thread, as long as the process lives."""

    def loop() -> None:
        while True:
            with contextlib.suppress(redis.RedisError, OSError):
                if shortages := [shortage for disk in disks if (shortage := disk.shortage())]:
                    oplog.take_none(shortages[0], _SHORT_S)
            time.sleep(_LOOK_S)

    threading.Thread(target=loop, name="disks", daemon=True).start()


class LimitsOf:
    """Finds the limits of projects and keys. Every call and the workers use it, so results are cached for some seconds,
    and a change takes effect only after that.

    `default` are the limits of every project. A key has no limits of its own unless some were set.
    """

    def __init__(self, store: RedisRecords, default: Limits) -> None:
        self._records, self._default = store, default
        self._found: dict[tuple[str, str], tuple[float, Limits]] = {}

    def project(self, project: str) -> Limits:
        """The project's limits; also for a project without an account, because each key of the settings is its own
        project."""
        return self._cached(Project, project, self._default)

    def may_have(self, name: str) -> bool:
        """False if no project has the limit `name`. Reads no value, so it also works for accounts of a later
        version."""
        return getattr(self._default, name) is not None or any(
            f'"{name}"' in fields.get("limits", "") for _, fields in self._records.list(Project.namespace)
        )

    def key(self, key: str) -> Limits:
        """The key's limits, by its id."""
        return self._cached(Key, key, _NONE)

    def payers(self, caller: Caller, project: str) -> tuple[Payer, ...]:
        """The payers of a caller's call on something of `project`: that project and the caller's key."""
        return self.payer(project), Payer(KEY, caller.key_id, self.key(caller.key_id))

    def payer(self, project: str) -> Payer:
        """The project as the only payer."""
        return Payer(PROJECT, project, self.project(project))

    def checkpoint_ttl_s(self, project: str) -> int | None:
        """The TTL of the project's checkpoints that get none of their own."""
        return self.project(project).checkpoint_ttl_s

    def _cached(self, cls: type[A], id_: str, default: Limits) -> Limits:
        until, limits = self._found.get((cls.namespace, id_), (0.0, default))
        if time.monotonic() >= until:
            found = self._records.find(cls, id_)
            limits = default.changed(found.limits) if found else default
            self._found[cls.namespace, id_] = time.monotonic() + _CACHED_S, limits
        return limits


class QuotaService:
    """Charges calls against limits. Reads cost nothing, and neither do calls that free something, because a limit must
    not prevent freeing.

    `take`, `reserve` and `move` raise TooManyRequests if the call can be repeated later, and LimitReached if something
    must be freed first.
    """

    def __init__(self, limits: LimitsOf, quotas: RedisQuotas, spending: Spending) -> None:
        self._limits, self._quotas, self._spending = limits, quotas, spending

    def take(self, caller: Caller, *projects: str) -> None:
        """Charges a call that creates or changes something in `projects`: once to each of them, and once to the key."""
        payers = dict.fromkeys(payer for project in projects for payer in self._limits.payers(caller, project))
        self._quotas.take(Charge(tuple(payers)))

    def of_session(self, caller: Caller, project: str) -> Charge:
        """The charge of a new session in `project`."""
        return Charge(self._limits.payers(caller, project), sessions=1)

    def reserve(
        self,
        caller: Caller | None,
        project: str,
        path: ids.TinkerPath,
        size: int,
        upload: tuple[str, Upload] | None = None,
    ) -> None:
        """Charges a call that creates a checkpoint of `size` bytes at `path` in `project`, and reserves the room for it
        until RedisRecords.put_reserved records it, for as long as its files may take. The caller is None for the
        operator. `upload`: an upload to record in the same step, with its id; a repeat charges nothing."""
        payers = self._limits.payers(caller, project) if caller else (self._limits.payer(project),)
        charge = Charge(payers, stores=True, stored=size)
        record = (upload[0], dump(upload[1])) if upload else None
        self._quotas.reserve(str(path), charge, RESERVED_S + size / _SLOWEST, record)

    @contextlib.contextmanager
    def releasing(self, path: ids.TinkerPath) -> Iterator[None]:
        """Releases the room reserved for `path` if the block fails."""
        try:
            yield
        except BaseException:
            self._quotas.release(str(path))
            raise

    def move(self, caller: Caller, project: str, *, sessions: int, models: int, size: int) -> None:
        """Charges a call that moves another project's session to `project`. The session, its models and its checkpoints
        still count for the keys that created them."""
        payer, key = self._limits.payers(caller, project)
        rates = replace(
            key, limits=key.limits.changed(dict.fromkeys(("live_models", "live_sessions", "storage_bytes")))
        )
        self._quotas.take(Charge((payer, rates), sessions=sessions, models=models, stores=size > 0, stored=size))

    def checkpoint_ttl_s(self, project: str) -> int | None:
        """As in LimitsOf."""
        return self._limits.checkpoint_ttl_s(project)

    def most_samples(self, caller: Caller, most: int) -> int:
        """The number of samples that a client should have in flight, at most `most`, the server's capacity."""
        own = [payer.limits.concurrent_samples for payer in self._limits.payers(caller, caller.project)]
        return min([most, *(limit for limit in own if limit is not None)])

    def describe(self, caller: Caller, project: str | None) -> dict[str, Any]:
        """The body of GET limits, for the caller's key and for its own or another project. Raises NotFound for a
        project that the caller does not see; this includes the key's own project once the caller was removed from
        it."""
        named = check_seen(caller, caller.project if project is None else project)
        return {payer.kind: self._view(payer, caller) for payer in self._limits.payers(caller, named)}

    def _view(self, payer: Payer, caller: Caller) -> dict[str, Any]:
        """A payer's limits and their use. Only a project's admins see its cost, unless it has a budget: the budget
        refuses calls of its members, so they see it too."""
        sees_cost = payer.limits.monthly_budget is not None or caller.may("admin", payer.id)
        spent = self._spending.this_month(payer.id) if payer.kind == PROJECT and sees_cost else None
        used = {**asdict(self._quotas.used(payer)), "monthly_budget": spent}
        return {"id": payer.id, "limits": asdict(payer.limits), "used": used}
