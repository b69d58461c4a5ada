"""Puts a worker together: backend, journal, leases, sweeper. One a process, made when Celery starts."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from celery import Celery

from app import doorbell
from app.domain.results import Result
from app.errors import SetupError
from app.settings import BaseModelSettings, Settings
from app.stores import objects
from app.stores.interfaces import ObjectStore, OpLog, Records
from app.stores.redis.client import connect
from app.stores.redis.oplog import RedisOpLog
from app.stores.redis.records import RedisRecords
from workers import node, telemetry
from workers.adapters import Adapters
from workers.executor import Executor
from workers.leases import LeaseKeeper
from workers.node import Presence
from workers.owner import Owner
from workers.runner import TrainingRunner
from workers.sample_runner import SampleRunner
from workers.saving import Saver
from workers.snapshot import Restore, Snapshots
from workers.sweeper import Sweeper

log = logging.getLogger(__name__)


class Handler(Protocol):
    def handle(self, request_id: str, model_id: str, kind: str) -> Result | None: ...


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a task needs, and what ends with the worker."""

    handler: Handler
    presence: Presence
    sweeper: Sweeper
    close: Callable[[], None]

    def handle(self, request_id: str, model_id: str, kind: str) -> Result | None:
        return self.handler.handle(request_id, model_id, kind)

    def announce(self) -> None:
        self.presence.start()
        self.sweeper.start()

    def stop(self) -> None:
        self.sweeper.stop()
        self.presence.stop()
        self.close()


@dataclass(frozen=True, slots=True)
class Parts:
    """What trainers and samplers are both made from."""

    oplog: OpLog
    records: Records
    store: ObjectStore
    keeper: LeaseKeeper
    doorbell: doorbell.Doorbell
    worker: str


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
    make = trainer if role == "train" else sampler
    _current = make(settings, base, parts(settings, celery, node_name), node_name, queue)
    return doorbell.direct_queue(queue, node_name)


def parts(settings: Settings, celery: Celery, node_name: str) -> Parts:
    client = connect(settings.redis.url)
    oplog = RedisOpLog(client, settings.engine)
    worker = node.worker_name(node_name)
    return Parts(
        oplog,
        RedisRecords(client),
        objects.create(settings),
        LeaseKeeper(oplog, worker, settings.engine.lease_s),
        doorbell.Doorbell(celery),
        worker,
    )


def _role(settings: Settings, queues: list[str]) -> tuple[str, BaseModelSettings, str]:
    for queue in queues:
        role, _, name = queue.partition(".")
        base = settings.base_model(name)
        if role in ("train", "sample") and base is not None:
            return role, base, queue
    names = ", ".join(base.name for base in settings.base_models) or "none"
    raise SetupError(
        f"-Q {','.join(queues)} names no base model: use train.<base> or sample.<base>; the settings have {names}"
    )


def trainer(settings: Settings, base: BaseModelSettings, parts: Parts, node_name: str, queue: str) -> Runtime:
    from workers.training.factory import create

    backend = create(base)
    info = backend.open()
    saver = Saver(backend, parts.records, parts.store)
    cache = _empty_cache(settings, node_name)
    executor = Executor(backend, parts.store, cache, saver)
    owner = Owner(parts.oplog, backend, parts.keeper, parts.worker, Restore(parts.oplog, executor))
    snapshots = Snapshots(parts.oplog, saver, settings.engine.snapshot_share)
    runner = TrainingRunner(parts.oplog, owner, executor, snapshots, parts.doorbell.ring, queue, node_name)
    metrics = telemetry.serve_metrics(base.trainer.metrics_port)
    presence = Presence(parts.records, node_name, "trainer", info, backend.describe, metrics)

    def close() -> None:
        owner.discard_all()
        backend.shutdown()
        parts.keeper.stop()

    return Runtime(runner, presence, _sweeper(settings, parts), close)


def sampler(settings: Settings, base: BaseModelSettings, parts: Parts, node_name: str, queue: str) -> Runtime:
    from workers.sampling.factory import create

    backend = create(base)
    info = backend.open()
    cache = _empty_cache(settings, node_name)
    adapters = Adapters(backend, parts.store, cache, 4 * base.sampler.max_loras)
    runner = SampleRunner(parts.oplog, parts.records, backend, adapters, parts.keeper, parts.worker)
    metrics = telemetry.serve_metrics(base.sampler.metrics_port)
    presence = Presence(parts.records, node_name, "sampler", info, backend.describe, metrics, backend.healthy)

    def close() -> None:
        backend.close()
        parts.keeper.stop()

    return Runtime(runner, presence, _sweeper(settings, parts), close)


def _empty_cache(settings: Settings, node_name: str) -> Path:
    """Fetched files of this process alone; what an earlier one left is of no use."""
    cache = settings.data_dir / "cache" / node_name
    shutil.rmtree(cache, ignore_errors=True)
    return cache


def _sweeper(settings: Settings, parts: Parts) -> Sweeper:
    return Sweeper(parts.oplog, parts.doorbell.ring, settings.engine, parts.worker)
