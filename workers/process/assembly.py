"""Assembles the worker of this process, a trainer or a sampler, when Celery starts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NoReturn

from celery import Celery

from app import dispatch, ids
from app.domain.checkpoints import Place
from app.errors import SetupError
from app.services.base_models import sampler_role, trainer_role
from app.services.tenants.limits import LimitsOf
from app.settings import BaseModelSettings, Settings, TrainerSettings
from app.stores.redis import keys
from app.stores.redis.client import Channel, connect
from workers.checkpoints.shm_transfer import Handovers
from workers.checkpoints.snapshot_upload import SnapshotFolder
from workers.checkpoints.snapshots import Restore, Snapshots
from workers.checkpoints.writer import Saver
from workers.process import telemetry
from workers.process.fair_queue import Shares, Weights
from workers.process.heartbeat import Presence
from workers.process.liveness import Probe, Pulse
from workers.process.parts import Parts, Runtime, empty_cache, end_in_any_case, exit_process, handover_folder, sweeper
from workers.sample import shared_memory
from workers.sample.adapters import AdapterFiles, Adapters, AdapterTurns
from workers.sample.admission import Gate, Held
from workers.sample.runner import SampleRunner, Watches
from workers.sample.token_stream import TokenPublisher
from workers.train.committer import Committer, Saves
from workers.train.executor import Executor
from workers.train.owner import Owner, Resident
from workers.train.rebalance import Drain, Spread, Tidying
from workers.train.runner import TrainingRunner
from workers.train.scheduler import Ahead, Parked, Turns, Unowned

_current: Runtime | None = None

_SETTLE_S = 5.0

# A sampler keeps this many adapters loaded for each that may run: one that comes back soon is not read again.
_LOADED_PER_TURN = 4


def current() -> Runtime:
    """The worker of this process: backend, journal, leases, watchdog, maintenance. Created when Celery starts."""
    assert _current is not None, "tasks run only after start()"
    return _current


def start(settings: Settings, celery: Celery, node_name: str, queues: list[str]) -> str:
    """Becomes the trainer or sampler that `queues` names; returns the name of the second queue, which only this node
    reads.

    Raises SetupError when the queues name no base model of the settings, or when its engine cannot start.
    """
    global _current
    role, base, queue = _role(settings, queues)
    make = assemble_sampler if role in ("sample", "fullsample") else assemble_trainer
    full = role in ("full", "fullsample")
    _current = make(settings, base, Parts.of(settings, celery, node_name), node_name, queue, full=full)
    return dispatch.direct_queue(queue, node_name)


def _role(settings: Settings, queues: list[str]) -> tuple[str, BaseModelSettings, str]:
    for queue in queues:
        role, _, name = queue.partition(".")
        base = settings.base_model(name)
        if role in ("train", "full", "sample", "fullsample") and base is not None:
            return role, base, queue
    names = ", ".join(base.name for base in settings.base_models) or "none"
    raise SetupError(
        f"-Q {','.join(queues)} names no base model: use train.<base>, full.<base>, sample.<base> or "
        f"fullsample.<base>; the settings have {names}"
    )


def assemble_trainer(
    settings: Settings, base: BaseModelSettings, parts: Parts, node_name: str, queue: str, *, full: bool = False
) -> Runtime:
    """Assembles a trainer."""
    from workers.backends.training.backends import create

    base = base.for_full() if full else base
    backend = create(base, full=full)
    info = backend.open()
    handovers = Handovers(parts.store, parts.records, handover_folder(settings))
    handovers.begin()
    saver = Saver(backend, parts.records, parts.store, handovers)
    cache = empty_cache(settings, node_name)
    executor = Executor(backend, parts.store, cache, saver)
    folder = SnapshotFolder(settings.data_dir / "snapshots", node_name)
    snapshots = Snapshots(parts.oplog, saver, folder, settings.engine)
    restore = Restore(parts.oplog, executor, folder, snapshots)
    direct, ring = dispatch.direct_queue(queue, node_name), parts.doorbell.ring

    def end(why: str) -> NoReturn:
        with end_in_any_case():
            drain.hand_over()
        exit_process(why)

    def settle(resident: Resident, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        committer.finish(resident, seconds)
        # An object store that hangs must leave time for the snapshot on the disk.
        handovers.finish(resident.lease.model_id, max(0.0, deadline - time.monotonic()) / 2)
        snapshots.settle(resident, within_s=max(0.0, deadline - time.monotonic()))

    pulse = Pulse(dispatch.TickBell(parts.celery, direct), backend.healthy, settings.engine.healthy_s, end)
    metrics, role = telemetry.serve_metrics(base.trainer.metrics_port), trainer_role(full=full)
    presence = Presence(parts.records, node_name, role, info, backend.describe, metrics, pulse.healthy, queue)
    most = base.trainer.max_models
    owner = Owner(
        parts.oplog,
        backend,
        parts.keeper,
        parts.worker,
        restore,
        settle,
        most,
        presence.refresh,
        handovers.give_up,
    )
    drain = Drain(parts.oplog, owner, ring, queue)
    parked = Parked(ring, direct)
    merged_tokens = _merged_tokens(base.trainer, backend.describe()["devices"])
    saves = Saves()
    ahead, wait_s = Ahead(saves, parked), base.trainer.merge_wait_s
    shares = Shares(Weights(LimitsOf(parts.records, settings.limits.project)))
    turns = Turns(parts.oplog, owner, ahead, shares, Unowned(parts.oplog, queue), merged_tokens, wait_s)
    committer = Committer(parts.oplog, owner, executor, snapshots, saves)
    runner = TrainingRunner(parts.oplog, owner, committer, backend.healthy, parked, turns, saves, ring, queue, end)
    spread = Spread(runner, owner, parts.records, ring, base.name, node_name, full=full)
    tidying = Tidying(owner, parked, parts.lifecycle.unwanted, settings.engine.idle_s, handovers.lost)

    def tidy() -> None:
        with pulse.working():
            runner.see_to_saves()
            tidying()

    def close() -> None:
        drain.in_order(_SETTLE_S)
        handovers.close()
        snapshots.close()
        backend.shutdown()
        parts.keeper.stop()

    return Runtime(runner, spread, queue, presence, pulse, sweeper(settings, parts), tidy, close, runner.leave)


def _merged_tokens(trainer: TrainerSettings, devices: Sequence[str]) -> int:
    """Returns the most tokens that other Ops may add to a pass; 0 for an exact trainer. A GPU promises no bits, and
    small passes leave most of it idle."""
    exact = set(devices) == {"cpu"} if trainer.exact == "auto" else trainer.exact
    return 0 if exact else trainer.merged_tokens


def assemble_sampler(
    settings: Settings, base: BaseModelSettings, parts: Parts, node_name: str, queue: str, *, full: bool = False
) -> Runtime:
    """Assembles a sampler."""
    from workers.backends.sampling.base import create

    base = base.for_full_sampler() if full else base
    backend = create(base, full=full)
    noted = settings.data_dir / "run" / f"{node_name}.shared-memory"
    shared_memory.remove_noted(noted)
    info = backend.open()
    shared_memory.note(noted)

    def own_its_model(prefix: str) -> None:
        """Makes a trainer own the adapter's model. Any trainer will do, as long as one owns it."""
        place = Place.parse(prefix)
        if place is not None:
            request_id = ids.request_id(place.model_id, place.seq)
            trainers = dispatch.train_queue(base.name, full=full)
            parts.doorbell.ring(dispatch.CATCH_UP, request_id, place.model_id, trainers)

    files = AdapterFiles(
        parts.store,
        parts.records,
        handover_folder(settings),
        empty_cache(settings, node_name),
        base.sampler.cache_bytes,
        own_its_model,
    )
    at_a_time = 1 if full else base.sampler.max_loras
    loaded = 1 if full else _LOADED_PER_TURN * at_a_time
    shares = Shares()
    adapters = Adapters(backend, files, AdapterTurns(at_a_time, shares), loaded)
    gate = Gate(shares, Weights(LimitsOf(parts.records, settings.limits.project)), base.sampler.max_batch)
    held = Held(parts.oplog, parts.doorbell.ring, queue, shares.ahead)
    watches = Watches()
    # While the state server is away this channel misses cancellations. The lease renewal reports them, a third of the
    # lease time later.
    Channel(connect(settings.redis.url), keys.ABORTED_CHANNEL, watches.abort).start()
    publisher = TokenPublisher(parts.streams)
    runner = SampleRunner(
        parts.oplog, parts.records, backend, adapters, parts.keeper, parts.worker, watches, publisher, gate, held
    )
    bell = dispatch.TickBell(parts.celery, dispatch.direct_queue(queue, node_name))
    # An orderly stop would wait for requests that never come back.
    pulse = Pulse(bell, backend.healthy, settings.engine.healthy_s, exit_process)
    metrics, role = telemetry.serve_metrics(base.sampler.metrics_port), sampler_role(full=full)
    presence = Presence(
        parts.records,
        node_name,
        role,
        info,
        backend.describe,
        metrics,
        pulse.healthy,
        queue,
        base.sampler.max_batch,
        base.sampler.concurrency,
    )
    probe = Probe(backend, pulse, settings.engine.healthy_s)

    def close() -> None:
        backend.close()
        publisher.close()
        parts.keeper.stop()

    return Runtime(runner, runner, queue, presence, pulse, sweeper(settings, parts), probe, close, presence.leave)
