"""Assembles the worker of this process, a trainer or a sampler, when Celery starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from celery import Celery

from app import dispatch, ids
from app.domain import adapters
from app.domain.checkpoints import CheckpointPrefix
from app.domain.records import Refusal
from app.errors import SetupError, UnservableModel
from app.services.base_models import NEVER_ADAPTED, SHAPES, WEIGHTS, sampler_role, trainer_role
from app.settings import BaseModelSettings, Settings, TrainerSettings
from app.stores.disk import Disk
from app.stores.objects.routes import RouteFiles
from app.stores.redis import keys
from app.stores.redis.client import Channel, connect_state
from app.stores.redis.records import dump
from app.tracing.tracer import create as create_tracer
from workers.backends.sampling.base import SamplerBackend
from workers.backends.training.base import TrainingBackend
from workers.checkpoints.coalescing import CoalescingWorker, NewLatest
from workers.checkpoints.shm_transfer import ShmTransfers
from workers.checkpoints.snapshot_upload import SnapshotFolder
from workers.checkpoints.snapshots import Restore, Snapshots
from workers.checkpoints.writer import Saver
from workers.process import node_name, telemetry
from workers.process.fair_queue import FairQueue, ProjectWeights
from workers.process.gpu_turns import GpuTurns, SamplerInTurns, TrainerInTurns
from workers.process.liveness import Heartbeat, Probe, Watchdog, worker_name
from workers.process.op_traces import OpTraces
from workers.process.parts import Backend, Parts, Serving, sweeper
from workers.process.runtime import Runtime, become, exit_on_hang, exit_process
from workers.sample import shared_memory
from workers.sample.adapters import AdapterFiles, Adapters, AdapterScheduler
from workers.sample.admission import BatchAdmission, ThrottledDispatch
from workers.sample.device_time import DeviceClock
from workers.sample.runner import RunningRequests, SampleRunner, TokenPublisher
from workers.train.committer import BackgroundSaves, Committer
from workers.train.executor import Executor
from workers.train.owner import Owner, Resident
from workers.train.rebalance import Drain, IdleEviction, Rebalancer
from workers.train.runner import TrainingRunner
from workers.train.scheduler import BacklogScan, RetryBackoff, RunAhead, Scheduler

if TYPE_CHECKING:
    from workers.models.base_model import Adaptable

_SETTLE_S = 5.0


def start(settings: Settings, celery: Celery, node: str, queues: list[str]) -> str:
    """Becomes the trainer or sampler that `queues` names; returns the name of the second queue, which only this node
    reads.

    Raises SetupError when the queues name no base model of the settings, when another live worker has the name of the
    node, or when the engine cannot start. Of these, UnservableModel is also recorded, so that the API does not wait for
    this worker.
    """
    kind, base, queue = _kind(settings, queues)
    samples, full = kind in ("sample", "fullsample"), kind in ("full", "fullsample")
    role = sampler_role(full=full) if samples else trainer_role(full=full)
    parts = Parts.of(settings, celery, worker_name(node))
    telemetry.send_task_events(dispatch.TaskEvents(celery, node))
    tracer = create_tracer(settings.tracing, "tinsmith-worker", node)
    if tracer is not None:
        telemetry.trace_ops(OpTraces(tracer, parts.oplog.trace_of))
    node_name.claim(parts.oplog, parts.worker, queue, settings.engine.lease_s)
    start_role = _start_sampler if samples else _start_trainer
    try:
        become(start_role(parts, base, queue, full=full))
    except UnservableModel as error:
        refusal = Refusal(role, base.name, str(error))
        parts.records.put(Refusal.namespace, Refusal.id(role, base.name), dump(refusal))
        raise
    return dispatch.direct_queue(queue, node)


def _kind(settings: Settings, queues: list[str]) -> tuple[str, BaseModelSettings, str]:
    for queue in queues:
        kind, _, name = queue.partition(".")
        base = settings.base_model(name)
        if kind in ("train", "full", "sample", "fullsample") and base is not None:
            return kind, base, queue
    names = ", ".join(base.name for base in settings.base_models) or "none"
    raise SetupError(
        f"-Q {','.join(queues)} names no base model: use train.<base>, full.<base>, sample.<base> or "
        f"fullsample.<base>; the settings have {names}"
    )


def _start_trainer(parts: Parts, base: BaseModelSettings, queue: str, *, full: bool) -> Runtime:
    from workers.backends.training.backends import create
    from workers.models.base_model import check_adaptable, weight_shapes
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
    info, metrics = backend.open(), telemetry.serve_metrics(base.trainer.metrics_port)
    return assemble_trainer(parts, Serving(base, backend, info, queue, full, metrics, facts, turns)).runtime()


def _adapter_facts(adaptable: Adaptable) -> dict[str, Any]:
    return {NEVER_ADAPTED: adaptable.never, SHAPES: adapters.rows(adaptable.shapes)}


def _start_sampler(parts: Parts, base: BaseModelSettings, queue: str, *, full: bool) -> Runtime:
    from workers.backends.sampling.base import create
    from workers.backends.sampling.vllm.backend import VllmSampler
    from workers.models.base_model import check_adaptable
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
    info = backend.open()
    shared_memory.note(noted)
    metrics = telemetry.serve_metrics(base.sampler.metrics_port)
    return assemble_sampler(parts, Serving(base, backend, info, queue, full, metrics, turns=turns)).runtime


def _turns_file(parts: Parts, base: BaseModelSettings, *, full: bool) -> Path:
    """The file of the turns that a trainer and a sampler of one machine take, where both find it."""
    return parts.settings.handover_dir / f"{'full' if full else 'adapters'},{base.name.replace('/', ',')}"


@dataclass(frozen=True, slots=True)
class Overrides:
    """The parts of a trainer that tests replace. The defaults are production's.

    `end` ends the process. `latest` makes a background thread. A model rests for `rest_s` between two snapshots. The
    backlog scan takes at most `scan_share` of the time.
    """

    end: Callable[[str], NoReturn] = exit_process
    background_saves: Callable[[], BackgroundSaves] = BackgroundSaves
    latest: NewLatest = CoalescingWorker
    rest_s: float = 10.0
    scan_share: float = 0.01


_PRODUCTION = Overrides()


@dataclass(frozen=True)
class Trainer:
    """An assembled trainer."""

    parts: Parts
    serving: Serving[TrainingBackend]
    watchdog: Watchdog
    heartbeat: Heartbeat
    shm_transfers: ShmTransfers
    snapshots: Snapshots
    owner: Owner
    drain: Drain
    retry_backoff: RetryBackoff
    runner: TrainingRunner
    rebalancer: Rebalancer
    idle_eviction: IdleEviction

    def runtime(self) -> Runtime:
        return Runtime(
            self.runner,
            self.rebalancer,
            self.serving.queue,
            self.heartbeat,
            self.watchdog,
            sweeper(self.parts),
            self.on_tick,
            self.close,
            self.runner.leave,
            self.hand_back,
        )

    def hand_back(self) -> None:
        """Gives the running Op and all models to other trainers, from any thread."""
        self.owner.hand_back()
        self.drain.release()

    def on_tick(self) -> None:
        with self.watchdog.working():
            self.runner.commit_saves()
            self.idle_eviction()

    def close(self) -> None:
        self.drain.settle_and_release(_SETTLE_S)
        self.shm_transfers.close()
        self.snapshots.close()
        self.serving.backend.shutdown()
        self.parts.keeper.stop()


def assemble_trainer(parts: Parts, serving: Serving[TrainingBackend], overrides: Overrides = _PRODUCTION) -> Trainer:
    """Assembles a trainer around its open backend."""
    oplog, send, queue, backend = parts.oplog, parts.dispatcher.send, serving.queue, serving.backend
    executor, snapshots, restore = _storage(parts, backend, overrides)
    shm_transfers = executor.saver.shm_transfers

    def end(why: str) -> NoReturn:
        with exit_on_hang():
            drain.release()
        overrides.end(why)

    def settle(resident: Resident, seconds: float) -> None:
        committer.settle(resident, seconds)

    watchdog = _watchdog(parts, serving, end)
    heartbeat = _heartbeat(parts, serving, trainer_role(full=serving.full), watchdog)
    most, changed = serving.base.trainer.max_models, heartbeat.refresh
    lost, gpu_turn = shm_transfers.not_restored, serving.gpu_turn_soon
    owner = Owner(oplog, backend, parts.keeper, parts.worker, restore, settle, most, changed, lost, gpu_turn)
    telemetry.SNAPSHOT_AGE.set_function(lambda: snapshots.age_s(owner.residents()))
    drain = Drain(oplog, owner, send, queue)
    retry_backoff = RetryBackoff(send, dispatch.direct_queue(queue, parts.node))
    background_saves = overrides.background_saves()
    scheduler = _scheduler(parts, serving, owner, RunAhead(background_saves, retry_backoff), overrides.scan_share)
    devices = serving.base.trainer.gpus_needed
    committer = Committer(oplog, owner, executor, snapshots, background_saves, devices)
    runner = TrainingRunner(
        oplog,
        owner,
        committer,
        backend.healthy,
        retry_backoff,
        scheduler,
        background_saves,
        send,
        queue,
        end,
        gpu_turn=gpu_turn,
        has_gpu_turn=serving.has_gpu_turn,
    )
    rebalancer = Rebalancer(runner, owner, parts.records, send, serving.base.name, parts.node, full=serving.full)
    idle_eviction = IdleEviction(
        owner, retry_backoff, parts.lifecycle.unwanted, parts.settings.engine.idle_s, shm_transfers.lost
    )
    return Trainer(
        parts,
        serving,
        watchdog,
        heartbeat,
        shm_transfers,
        snapshots,
        owner,
        drain,
        retry_backoff,
        runner,
        rebalancer,
        idle_eviction,
    )


def _storage(parts: Parts, backend: TrainingBackend, overrides: Overrides) -> tuple[Executor, Snapshots, Restore]:
    shm_transfers = ShmTransfers(parts.store, parts.records, parts.shm_folder, overrides.latest)
    shm_transfers.begin()
    cache, least_free = parts.fresh_cache_folder(), parts.settings.engine.free_disk_bytes
    scratch = Disk("the saves", cache / "saves", least_free)
    saver = Saver(backend, parts.records, parts.store, shm_transfers, parts.limits.checkpoint_ttl_s, scratch)
    executor = Executor(backend, parts.store, Disk("the fetched checkpoints", cache / "fetched", least_free), saver)
    folder = SnapshotFolder(parts.settings.data_dir / "snapshots", parts.node, least_free)
    snapshots = Snapshots(parts.oplog, saver, folder, parts.settings.engine, overrides.rest_s, overrides.latest)
    return executor, snapshots, Restore(parts.oplog, executor, folder, snapshots)


def _scheduler(
    parts: Parts, serving: Serving[TrainingBackend], owner: Owner, run_ahead: RunAhead, scan_share: float
) -> Scheduler:
    trainer, backlog_scan = serving.base.trainer, BacklogScan(parts.oplog, serving.queue, scan_share)
    merged_tokens, fair_queue = _merged_tokens(trainer, serving.backend.describe()), FairQueue(_weights(parts))
    return Scheduler(parts.oplog, owner, run_ahead, fair_queue, backlog_scan, merged_tokens, trainer.merge_wait_s)


def _merged_tokens(trainer: TrainerSettings, facts: Mapping[str, Any]) -> int:
    """Returns the most tokens that other Ops may add to a pass; 0 for an exact trainer. A GPU promises no bits, and
    small passes leave most of it idle."""
    exact = set(facts["devices"]) == {"cpu"} if trainer.exact == "auto" else trainer.exact
    most = max(8192, facts["micro_batch_tokens"]) if trainer.merged_tokens == "auto" else trainer.merged_tokens
    return 0 if exact else most


@dataclass(frozen=True, slots=True)
class Sampler:
    """An assembled sampler. `cancellations` reports the requests that were cancelled."""

    parts: Parts
    runner: SampleRunner
    cancellations: Channel
    runtime: Runtime


def assemble_sampler(parts: Parts, serving: Serving[SamplerBackend], cancelled: str = keys.ABORTED_CHANNEL) -> Sampler:
    """Assembles a sampler around its open backend. It hears of cancelled requests on the channel `cancelled`."""
    oplog, queue, backend, sampler = parts.oplog, serving.queue, serving.backend, serving.base.sampler
    fair_queue, running_requests, publisher = FairQueue(), RunningRequests(), TokenPublisher(parts.streams)
    adapters = _adapters(parts, serving, fair_queue)
    batch_admission = BatchAdmission(fair_queue, _weights(parts), backend.batch)
    throttled = ThrottledDispatch(oplog, parts.dispatcher.send, queue, fair_queue.most_served)
    runner = SampleRunner(
        oplog,
        parts.records,
        backend,
        adapters,
        parts.keeper,
        parts.worker,
        running_requests,
        publisher,
        batch_admission,
        throttled,
        RouteFiles(parts.store, parts.records.now),
        DeviceClock(sampler.gpus_needed),
        gpu_turn=serving.gpu_turn,
    )
    # While the state server is away this channel misses cancellations. The lease renewal reports them, a third of the
    # lease time later.
    cancellations = Channel(connect_state(parts.settings.redis.url), cancelled, running_requests.abort)
    cancellations.start()
    # An orderly stop would wait for requests that never come back.
    watchdog = _watchdog(parts, serving, exit_process)
    role = sampler_role(full=serving.full)
    heartbeat = _heartbeat(parts, serving, role, watchdog, backend.batch, sampler.concurrency)
    probe = Probe(backend, watchdog, parts.settings.engine.healthy_s, serving.has_gpu_turn, serving.gpu_turn_soon)

    def close() -> None:
        backend.close()
        publisher.close()
        cancellations.close()
        parts.keeper.stop()

    def hand_back() -> None:
        for request_id in runner.hand_back():
            parts.dispatcher.send("sample", request_id, request_id.rpartition(":")[0], queue)

    sweep, leave = sweeper(parts), heartbeat.leave
    runtime = Runtime(runner, runner, queue, heartbeat, watchdog, sweep, probe, close, leave, hand_back)
    return Sampler(parts, runner, cancellations, runtime)


def _adapters(parts: Parts, serving: Serving[SamplerBackend], fair_queue: FairQueue) -> Adapters:
    def request_owner(prefix: str) -> None:
        """Makes a trainer own the adapter's model. Any trainer will do, as long as one owns it."""
        place = CheckpointPrefix.parse(prefix)
        if place is not None:
            request_id = ids.request_id(place.model_id, place.seq)
            trainers = dispatch.train_queue(serving.base.name, full=serving.full)
            parts.records.put_demand(trainer_role(full=serving.full), serving.base.name)
            parts.dispatcher.send(dispatch.CATCH_UP, request_id, place.model_id, trainers)

    nearby, sampler = parts.shm_folder, serving.base.sampler
    cache = Disk("the fetched adapters", parts.fresh_cache_folder(), parts.settings.engine.free_disk_bytes)
    most_bytes, full = sampler.cache_bytes, serving.full
    files = AdapterFiles(parts.store, parts.records, nearby, cache, most_bytes, request_owner, in_place=full)
    at_a_time = 1 if serving.full else sampler.max_loras
    scheduler, capacity = AdapterScheduler(at_a_time, fair_queue), serving.backend.adapter_capacity
    return Adapters(serving.backend, files, scheduler, capacity, serving.gpu_turn)


def _weights(parts: Parts) -> ProjectWeights:
    return ProjectWeights(parts.limits)


def _watchdog(parts: Parts, serving: Serving[Backend], end: Callable[[str], NoReturn]) -> Watchdog:
    ticks = dispatch.TickSender(parts.celery, dispatch.direct_queue(serving.queue, parts.node))
    return Watchdog(ticks, serving.backend.healthy, parts.settings.engine.healthy_s, end)


def _heartbeat(
    parts: Parts, serving: Serving[Backend], role: str, watchdog: Watchdog, batch: int = 0, holds: int = 0
) -> Heartbeat:
    url, queue = serving.metrics_url, serving.queue

    def describe() -> Mapping[str, Any]:
        return {**serving.backend.describe(), **serving.facts}

    return Heartbeat(
        parts.records, parts.node, role, serving.info, describe, url, watchdog.healthy, queue, batch, holds
    )
