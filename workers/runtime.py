"""Puts a worker together: backend, journal, leases, pulse, sweeper. One a process, made when Celery starts."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from celery import Celery

from app import doorbell, ids
from app.domain.checkpoints import Place
from app.domain.results import Result
from app.errors import SetupError
from app.services.base_models import sampler_role, trainer_role
from app.services.endings import Endings
from app.settings import BaseModelSettings, Settings, TrainerSettings
from app.stores import objects
from app.stores.interfaces import Lifecycle, ObjectStore, OpLog, Payloads, Records
from app.stores.redis import keys
from app.stores.redis.channel import Channel
from app.stores.redis.client import connect
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.oplog import RedisOpLog
from app.stores.redis.payloads import RedisPayloads
from app.stores.redis.records import RedisRecords
from app.stores.redis.token_streams import TokenStreams
from workers import telemetry
from workers.adapter_files import AdapterFiles
from workers.adapter_turns import AdapterTurns
from workers.adapters import Adapters
from workers.ahead import Ahead
from workers.chores.base import Chore
from workers.chores.orphans import Orphans
from workers.chores.ringing import Ringing
from workers.chores.sessions import Sessions
from workers.chores.spilling import Spilling
from workers.committer import Committer
from workers.drain import Drain
from workers.executor import Executor
from workers.handover.folder import HandoverFolder
from workers.handover.sending import Handovers
from workers.health.presence import Presence, worker_name
from workers.health.probe import Probe
from workers.health.pulse import Pulse
from workers.leases import LeaseKeeper
from workers.owner import Owner, Resident
from workers.parked import Parked
from workers.runner import TrainingRunner
from workers.sample_runner import SampleRunner
from workers.saves import Saves
from workers.saving import Saver
from workers.snapshots.folder import SnapshotFolder
from workers.snapshots.restore import Restore
from workers.snapshots.schedule import Snapshots
from workers.spread import Spread
from workers.sweeper import Sweeper
from workers.tidying import Tidying
from workers.token_publisher import TokenPublisher
from workers.turns import Turns
from workers.watches import Watches

log = logging.getLogger(__name__)
_SETTLE_S = 5.0
_STOP_S = 20.0
# Adapters a sampler keeps loaded for each that may run: one that comes back soon need not be read again.
_LOADED_PER_TURN = 4


class Handler(Protocol):
    def handle(self, request_id: str, model_id: str, kind: str) -> Result | None: ...


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a task needs, and what ends with the worker.

    `shared` handles doorbells of `queue`, which all workers of the kind read; `handler` those for this one alone.
    """

    handler: Handler
    shared: Handler
    queue: str
    presence: Presence
    pulse: Pulse
    sweeper: Sweeper
    tidy: Callable[[], None]
    close: Callable[[], None]
    leave: Callable[[], None] = lambda: None
    """Told, as soon as the worker is asked to end, that what runs is the last. May be called from a signal handler."""

    def handle(self, request_id: str, model_id: str, kind: str, queue: str = "") -> Result | None:
        handler = self.shared if queue == self.queue else self.handler
        with self.pulse.working():
            return handler.handle(request_id, model_id, kind)

    def tick(self) -> None:
        self.tidy()
        self.pulse.answered()

    def announce(self) -> None:
        self.presence.start()
        self.pulse.start()
        self.sweeper.start()

    def stop(self) -> None:
        """The running task has ended, and no other begins."""
        with _end_in_any_case():
            self.pulse.stop()
            self.sweeper.stop()
            self.presence.stop()
            self.close()


@dataclass(frozen=True, slots=True)
class Parts:
    """What trainers and samplers are both made from."""

    oplog: OpLog
    records: Records
    lifecycle: Lifecycle
    payloads: Payloads
    store: ObjectStore
    keeper: LeaseKeeper
    doorbell: doorbell.Doorbell
    celery: Celery
    worker: str
    streams: TokenStreams


_current: Runtime | None = None


def current() -> Runtime:
    assert _current is not None, "tasks run only after start()"
    return _current


def start(settings: Settings, celery: Celery, node_name: str, queues: list[str]) -> str:
    """Become the trainer or sampler that `queues` says; returns the further queue only this node reads.

    Raises SetupError when the queues name no base model of the settings, or its engine cannot start.
    """
    global _current
    role, base, queue = _role(settings, queues)
    make = sampler if role in ("sample", "fullsample") else trainer
    full = role in ("full", "fullsample")
    _current = make(settings, base, parts(settings, celery, node_name), node_name, queue, full=full)
    return doorbell.direct_queue(queue, node_name)


def parts(settings: Settings, celery: Celery, node_name: str) -> Parts:
    client = connect(settings.redis.url)
    store = objects.create(settings, may_be_away=True)
    oplog = RedisOpLog(client, settings.engine, store)
    worker = worker_name(node_name)
    return Parts(
        oplog,
        RedisRecords(client),
        RedisLifecycle(client, settings.engine),
        RedisPayloads(client, settings.engine, store),
        store,
        LeaseKeeper(oplog, worker, settings.engine.lease_s),
        doorbell.Doorbell(celery),
        celery,
        worker,
        TokenStreams(connect(settings.broker_url)),
    )


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


def trainer(
    settings: Settings, base: BaseModelSettings, parts: Parts, node_name: str, queue: str, *, full: bool = False
) -> Runtime:
    from workers.training.factory import create

    base = base.for_full() if full else base
    backend = create(base, full=full)
    info = backend.open()
    handovers = Handovers(parts.store, parts.records, _handover_folder(settings))
    handovers.begin()
    saver = Saver(backend, parts.records, parts.store, handovers)
    cache = _empty_cache(settings, node_name)
    executor = Executor(backend, parts.store, cache, saver)
    folder = SnapshotFolder(settings.data_dir / "snapshots", node_name)
    snapshots = Snapshots(parts.oplog, saver, folder, settings.engine)
    restore = Restore(parts.oplog, executor, folder, snapshots)
    direct, ring = doorbell.direct_queue(queue, node_name), parts.doorbell.ring

    def end(why: str) -> NoReturn:
        with _end_in_any_case():
            drain.hand_over()
        _exit(why)

    def settle(resident: Resident, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        committer.finish(resident, seconds)
        # A store that hangs leaves time for the snapshot on the disk.
        handovers.finish(resident.lease.model_id, max(0.0, deadline - time.monotonic()) / 2)
        snapshots.settle(resident, within_s=max(0.0, deadline - time.monotonic()))

    pulse = Pulse(doorbell.TickBell(parts.celery, direct), backend.healthy, settings.engine.healthy_s, end)
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
    turns = Turns(parts.oplog, owner, Ahead(saves, parked), merged_tokens, base.trainer.merge_wait_s)
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

    return Runtime(runner, spread, queue, presence, pulse, _sweeper(settings, parts), tidy, close, runner.leave)


def _merged_tokens(trainer: TrainerSettings, devices: Sequence[str]) -> int:
    """A GPU promises no bits, and small passes leave most of it idle."""
    exact = set(devices) == {"cpu"} if trainer.exact == "auto" else trainer.exact
    return 0 if exact else trainer.merged_tokens


def sampler(
    settings: Settings, base: BaseModelSettings, parts: Parts, node_name: str, queue: str, *, full: bool = False
) -> Runtime:
    from workers.sampling.factory import create

    base = base.for_full_sampler() if full else base
    backend = create(base, full=full)
    info = backend.open()

    def own_its_model(prefix: str) -> None:
        """Whoever answers may be anybody: it is enough that somebody owns it."""
        place = Place.parse(prefix)
        if place is not None:
            request_id = ids.request_id(place.model_id, place.seq)
            trainers = doorbell.train_queue(base.name, full=full)
            parts.doorbell.ring(doorbell.CATCH_UP, request_id, place.model_id, trainers)

    files = AdapterFiles(
        parts.store,
        parts.records,
        _handover_folder(settings),
        _empty_cache(settings, node_name),
        base.sampler.cache_bytes,
        own_its_model,
    )
    at_a_time = 1 if full else base.sampler.max_loras
    loaded = 1 if full else _LOADED_PER_TURN * at_a_time
    adapters = Adapters(backend, files, AdapterTurns(at_a_time), loaded)
    watches = Watches()
    # What it misses while the state server is away the leases tell, a third of their time later.
    Channel(connect(settings.redis.url), keys.ABORTED_CHANNEL, watches.abort).start()
    publisher = TokenPublisher(parts.streams)
    runner = SampleRunner(parts.oplog, parts.records, backend, adapters, parts.keeper, parts.worker, watches, publisher)
    bell = doorbell.TickBell(parts.celery, doorbell.direct_queue(queue, node_name))
    # An orderly stop would wait for requests that never come back.
    pulse = Pulse(bell, backend.healthy, settings.engine.healthy_s, _exit)
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

    return Runtime(runner, runner, queue, presence, pulse, _sweeper(settings, parts), probe, close, presence.leave)


@contextmanager
def _end_in_any_case() -> Iterator[None]:
    """Ends the process if the block hangs, as it may on a rank or a server that is gone."""
    late = threading.Timer(_STOP_S, _exit, [f"it did not stop within {_STOP_S:.0f} s"])
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def _exit(why: str) -> NoReturn:
    """With a status that says it was not asked for, so that whoever looks after this process starts it again."""
    log.error("ending, to be started again: %s", why)
    logging.shutdown()
    os._exit(1)


def _handover_folder(settings: Settings) -> HandoverFolder:
    return HandoverFolder(settings.handover_dir, settings.engine.handover_bytes)


def _empty_cache(settings: Settings, node_name: str) -> Path:
    """Fetched files of this process alone; what an earlier one left is of no use."""
    cache = settings.data_dir / "cache" / node_name
    shutil.rmtree(cache, ignore_errors=True)
    return cache


def _sweeper(settings: Settings, parts: Parts) -> Sweeper:
    endings = Endings(parts.lifecycle, parts.records, parts.store, parts.doorbell.wake)
    chores: dict[str, Chore] = {
        "ringing": Ringing(parts.oplog, parts.doorbell.ring, settings.engine),
        "sessions": Sessions(parts.lifecycle, endings),
        "orphans": Orphans(parts.oplog, parts.lifecycle, parts.records, parts.store, settings.engine),
        "spilling": Spilling(parts.payloads),
    }
    return Sweeper(parts.oplog, chores, parts.worker)
