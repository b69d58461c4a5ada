"""The parts common to trainers and samplers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import redis

from app import dispatch, ids
from app.domain.records import BaseModelInfo
from app.services.teardown import Teardown
from app.services.tenants.limits import LimitsFinder
from app.settings import BaseModelSettings, Settings
from app.stores import objects
from app.stores.objects.base import ObjectStore
from app.stores.objects.captures import CaptureFiles
from app.stores.pages import PageFiles
from app.stores.redis.client import connect, connect_state
from app.stores.redis.completions import TokenStreams
from app.stores.redis.durability import check_at_start
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.pages import RedisPages
from app.stores.redis.payloads import RedisPayloads
from app.stores.redis.records import RedisRecords
from app.stores.store_id import check_store_id
from workers.backends.sampling.base import RequestHandle, SamplerBackend
from workers.backends.training.base import TrainingBackend
from workers.checkpoints.shm_transfer import ShmFolder
from workers.maintenance.accounting import Accounting
from workers.maintenance.adapters import EphemeralAdapters
from workers.maintenance.captures import ExpiredCaptures
from workers.maintenance.direct_queues import DirectQueues
from workers.maintenance.leader import MaintenanceRunner, MaintenanceTask, WhileSteady
from workers.maintenance.orphans import Orphans
from workers.maintenance.redispatch import Redispatcher
from workers.maintenance.retention import Retention
from workers.maintenance.sessions import SessionExpiry
from workers.maintenance.spilling import PayloadSpilling
from workers.process.gpu_turns import GpuTurns
from workers.process.liveness import Heartbeat, LeaseKeeper, Watchdog

Backend = TypeVar("Backend", TrainingBackend, SamplerBackend)
_SOON_S = 0.5


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that trainers and samplers share. `worker` is "node/boot", the name of this process. The thread of
    `keeper` runs already."""

    settings: Settings
    worker: str
    oplog: RedisOpLog
    records: RedisRecords
    lifecycle: RedisLifecycle
    payloads: RedisPayloads
    pages: RedisPages
    store: ObjectStore
    keeper: LeaseKeeper
    dispatcher: dispatch.Dispatcher
    celery: dispatch.App
    streams: TokenStreams

    @classmethod
    def of(cls, settings: Settings, celery: dispatch.App, worker: str) -> Parts:
        """The parts over the servers of the settings. Raises SetupError for a server that cannot be used."""
        client = connect_state(settings.redis.url)
        check_at_start(client)
        store = objects.create(settings, may_be_away=True)
        check_store_id(settings, RedisRecords(client, settings.engine), store)
        oplog, streams = RedisOpLog(client, settings.engine, store), TokenStreams(connect(settings.broker_url))
        return cls.over(client, settings, worker, oplog, store, dispatch.Dispatcher(celery), celery, streams)

    @classmethod
    def over(
        cls,
        client: redis.Redis,
        settings: Settings,
        worker: str,
        oplog: RedisOpLog,
        store: ObjectStore,
        dispatcher: dispatch.Dispatcher,
        celery: dispatch.App,
        streams: TokenStreams,
    ) -> Parts:
        """The parts over these servers."""
        engine, records = settings.engine, RedisRecords(client, settings.engine)
        lifecycle, payloads = RedisLifecycle(client, engine), RedisPayloads(client, engine, store)
        pages, keeper = RedisPages(client, engine), LeaseKeeper(oplog, worker, engine.lease_s)
        return cls(
            settings, worker, oplog, records, lifecycle, payloads, pages, store, keeper, dispatcher, celery, streams
        )

    @property
    def node(self) -> str:
        return ids.node_of(self.worker)

    @property
    def limits(self) -> LimitsFinder:
        return LimitsFinder(self.records, self.settings.limits.project)

    @property
    def shm_folder(self) -> ShmFolder:
        return ShmFolder(self.settings.handover_dir, self.settings.engine.handover_bytes)

    def fresh_cache_folder(self) -> Path:
        """The folder of the files that this process fetches, and of those it has not uploaded yet. Files of an earlier
        process are of no use and are removed."""
        cache = self.settings.data_dir / "cache" / self.node
        shutil.rmtree(cache, ignore_errors=True)
        return cache


@dataclass(frozen=True, slots=True)
class Serving(Generic[Backend]):
    """The base model of a worker, the open backend it runs on, and the queue that all workers of the role read."""

    base: BaseModelSettings
    backend: Backend
    info: BaseModelInfo
    queue: str
    full: bool = False
    metrics_url: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further facts of the base model that the worker reports to the API."""
    turns: GpuTurns | None = None
    """The turns on GPUs that a trainer and a sampler share; None where they do not."""

    def gpu_turn(self, handle: RequestHandle) -> AbstractContextManager[object]:
        """Waits for a turn on the GPUs, which lasts as long as the block. See GpuTurns.use."""
        return nullcontext() if self.turns is None else self.turns.use(handle)

    def gpu_turn_soon(self) -> AbstractContextManager[object]:
        """Like `gpu_turn`, for a thread that has other work too: raises NoTurnYet after half a second."""
        return nullcontext() if self.turns is None else self.turns.use(within_s=_SOON_S)

    def has_gpu_turn(self) -> bool:
        return self.turns is None or self.turns.held


def create_watchdog(parts: Parts, serving: Serving[Backend], end: Callable[[str], NoReturn]) -> Watchdog:
    ticks = dispatch.TickSender(parts.celery, dispatch.direct_queue(serving.queue, parts.node))
    return Watchdog(ticks, serving.backend.healthy, parts.settings.engine.healthy_s, end)


def create_heartbeat(
    parts: Parts, serving: Serving[Backend], role: str, watchdog: Watchdog, *, batch: int = 0, holds: int = 0
) -> Heartbeat:
    return Heartbeat(
        records=parts.records,
        node=parts.node,
        role=role,
        info=serving.info,
        describe=lambda: {**serving.backend.describe(), **serving.facts},
        metrics_url=serving.metrics_url,
        healthy=watchdog.healthy,
        queue=serving.queue,
        batch=batch,
        holds=holds,
    )


def create_maintenance(parts: Parts) -> MaintenanceRunner:
    teardown = Teardown(parts.lifecycle, parts.records, parts.store, parts.dispatcher.wake)
    captures = CaptureFiles(parts.store, parts.settings.capture_secret, parts.records.now)

    def while_steady(task: MaintenanceTask) -> WhileSteady:
        return WhileSteady(task, parts.oplog, parts.settings.engine.session_s)

    tasks: dict[str, MaintenanceTask] = {
        # Its leader's lease had this name in every version, and one leader at a time is the point.
        "ringing": Redispatcher(
            parts.oplog, parts.dispatcher.send, parts.settings.engine, connect(parts.celery.redis_url)
        ),
        "sessions": SessionExpiry(
            parts.oplog, parts.lifecycle, parts.records, teardown, parts.settings.engine.session_s
        ),
        "orphans": while_steady(
            Orphans(parts.oplog, parts.lifecycle, parts.records, parts.payloads, parts.store, parts.settings.engine)
        ),
        "adapters": EphemeralAdapters(parts.lifecycle, parts.records, parts.store, parts.settings.engine),
        "retention": Retention(parts.records, parts.limits),
        "captures": while_steady(ExpiredCaptures(captures)),
        "spilling": PayloadSpilling(parts.payloads),
        "direct queues": DirectQueues(parts.oplog, parts.celery),
        "accounting": while_steady(Accounting(parts.pages, PageFiles(parts.store), parts.records)),
    }
    return MaintenanceRunner(parts.oplog, tasks, parts.worker)
