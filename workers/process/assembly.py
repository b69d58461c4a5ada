"""Starts the worker of this process, a trainer or a sampler, when Celery starts."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery import Celery

from app import dispatch
from app.domain import adapters
from app.domain.records import Refusal
from app.errors import SetupError, UnservableModel
from app.services.base_models import NEVER_ADAPTED, SHAPES, WEIGHTS, sampler_role, trainer_role
from app.settings import BaseModelSettings, Settings
from app.stores.redis.records import dump
from app.tracing.tracer import create as create_tracer
from workers.backends.training.base import TrainingBackend
from workers.process import node_name, telemetry
from workers.process.gpu_turns import GpuTurns, SamplerInTurns, TrainerInTurns
from workers.process.liveness import worker_name
from workers.process.op_traces import OpTraces
from workers.process.parts import Parts, Serving
from workers.process.runtime import Runtime, become
from workers.sample import shared_memory
from workers.sample.assembly import assemble_sampler
from workers.train.assembly import assemble_trainer

if TYPE_CHECKING:
    from workers.models.base_model import Adaptable


def start(settings: Settings, celery: Celery, node: str, queues: list[str]) -> str:
    """Becomes the trainer or sampler that `queues` names; returns the name of the second queue, which only this node
    reads.

    Raises SetupError when the queues name no base model of the settings, when another live worker has the name of the
    node, or when the engine cannot start. Of these, UnservableModel is also recorded, so that the API does not wait for
    this worker.
    """
    work, base, queue = _work(settings, queues)
    role = sampler_role(full=work.full) if work.samples else trainer_role(full=work.full)
    parts = Parts.of(settings, celery, worker_name(node))
    telemetry.send_task_events(dispatch.TaskEvents(celery, node))
    tracer = create_tracer(settings.tracing, "tinsmith-worker", node)
    if tracer is not None:
        telemetry.trace_ops(OpTraces(tracer, parts.oplog.trace_of))
    node_name.claim(parts.oplog, parts.worker, queue, settings.engine.lease_s)
    start_role = _start_sampler if work.samples else _start_trainer
    try:
        become(start_role(parts, base, queue, full=work.full))
    except UnservableModel as error:
        refusal = Refusal(role, base.name, str(error))
        parts.records.put(Refusal.namespace, Refusal.id(role, base.name), dump(refusal))
        raise
    return dispatch.direct_queue(queue, node)


def _work(settings: Settings, queues: list[str]) -> tuple[dispatch.Work, BaseModelSettings, str]:
    for queue in queues:
        work = dispatch.parse_queue(queue)
        base = work and settings.base_model(work.base_model)
        if work and base:
            return work, base, queue
    names = ", ".join(base.name for base in settings.base_models) or "none"
    raise SetupError(
        f"-Q {','.join(queues)} names no base model: use train.<base>, full.<base>, sample.<base> or "
        f"fullsample.<base>; the settings have {names}"
    )


def _start_trainer(parts: Parts, base: BaseModelSettings, queue: str, *, full: bool) -> Runtime:
    from workers.backends.training.backends import create
    from workers.models.base_model import check_adaptable
    from workers.models.full_weights import weight_shapes
    from workers.models.loading import base_weights
    from workers.models.routers import check_replayable

    base.check_turns()
    base = base.for_full() if full else base
    if base.router_replay:
        check_replayable(base)
    facts = {SHAPES: adapters.rows({WEIGHTS: weight_shapes(base)})} if full else _adapter_facts(check_adaptable(base))
    backend: TrainingBackend = create(base, full=full)
    turns: GpuTurns | None = None
    if base.takes_turns(full=full):
        backend = shared = TrainerInTurns(backend, _turns_file(parts, base, full=full), base.trainer.rank_deadline_s)
        turns = shared.turns
    with base_weights.checked(parts.records, base):
        info = backend.open()
    metrics = telemetry.serve_metrics(base.trainer.metrics_port)
    serving = Serving(base, backend, info, queue, full=full, metrics_url=metrics, facts=facts, turns=turns)
    return assemble_trainer(parts, serving).runtime()


def _adapter_facts(adaptable: Adaptable) -> dict[str, Any]:
    return {NEVER_ADAPTED: adaptable.never, SHAPES: adapters.rows(adaptable.shapes)}


def _start_sampler(parts: Parts, base: BaseModelSettings, queue: str, *, full: bool) -> Runtime:
    from workers.backends.sampling.backends import create
    from workers.backends.sampling.vllm.backend import VllmSampler
    from workers.models.base_model import check_adaptable
    from workers.models.loading import base_weights
    from workers.models.routers import check_replayable

    base.check_turns()
    base = base.for_full_sampler() if full else base
    if base.router_replay:
        check_replayable(base)
    if not full:
        check_adaptable(base)
    backend = create(base, full=full)
    turns: GpuTurns | None = None
    if isinstance(backend, VllmSampler) and base.takes_turns(full=full):
        backend = shared = SamplerInTurns(backend, _turns_file(parts, base, full=full), base.sampler.step_deadline_s)
        turns = shared.turns
    noted = parts.settings.data_dir / "run" / f"{parts.node}.shared-memory"
    shared_memory.remove_noted(noted)
    with nullcontext() if _has_own_weights(base) else base_weights.checked(parts.records, base):
        info = backend.open()
        shared_memory.note(noted)
    metrics = telemetry.serve_metrics(base.sampler.metrics_port)
    serving = Serving(base, backend, info, queue, full=full, metrics_url=metrics, turns=turns)
    return assemble_sampler(parts, serving).runtime


def _has_own_weights(base: BaseModelSettings) -> bool:
    """True if the arguments of vLLM name other files than the trainer reads, such as a quantised copy."""
    return any(name in base.sampler.engine_args for name in ("model", "revision", "download_dir"))


def _turns_file(parts: Parts, base: BaseModelSettings, *, full: bool) -> Path:
    """The file of the turns that a trainer and a sampler of one machine take, where both find it."""
    return parts.settings.handover_dir / f"{'full' if full else 'adapters'},{base.name.replace('/', ',')}"
