"""What trainers and samplers are both made from."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from celery import Celery

from app import doorbell
from app.services.endings import Endings
from app.settings import Settings
from app.stores import objects
from app.stores.interfaces import Lifecycle, ObjectStore, OpLog, Payloads, Records
from app.stores.objects.pages import PageFiles
from app.stores.pages import Pages
from app.stores.redis.client import connect
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.oplog import RedisOpLog
from app.stores.redis.pages import RedisPages
from app.stores.redis.payloads import RedisPayloads
from app.stores.redis.records import RedisRecords
from app.stores.redis.token_streams import TokenStreams
from workers.chores.accounting import Accounting
from workers.chores.base import Chore
from workers.chores.orphans import Orphans
from workers.chores.ringing import Ringing
from workers.chores.sessions import Sessions
from workers.chores.spilling import Spilling
from workers.handover.folder import HandoverFolder
from workers.health.presence import worker_name
from workers.leases import LeaseKeeper
from workers.sweeper import Sweeper


@dataclass(frozen=True, slots=True)
class Parts:
    """What trainers and samplers are both made from."""

    oplog: OpLog
    records: Records
    lifecycle: Lifecycle
    payloads: Payloads
    pages: Pages
    store: ObjectStore
    keeper: LeaseKeeper
    doorbell: doorbell.Doorbell
    celery: Celery
    worker: str
    streams: TokenStreams

    @classmethod
    def of(cls, settings: Settings, celery: Celery, node_name: str) -> Parts:
        client = connect(settings.redis.url)
        store = objects.create(settings, may_be_away=True)
        oplog = RedisOpLog(client, settings.engine, store)
        worker = worker_name(node_name)
        return cls(
            oplog,
            RedisRecords(client),
            RedisLifecycle(client, settings.engine),
            RedisPayloads(client, settings.engine, store),
            RedisPages(client, settings.engine),
            store,
            LeaseKeeper(oplog, worker, settings.engine.lease_s),
            doorbell.Doorbell(celery),
            celery,
            worker,
            TokenStreams(connect(settings.broker_url)),
        )


def handover_folder(settings: Settings) -> HandoverFolder:
    return HandoverFolder(settings.handover_dir, settings.engine.handover_bytes)


def empty_cache(settings: Settings, node_name: str) -> Path:
    """Fetched files of this process alone; what an earlier one left is of no use."""
    cache = settings.data_dir / "cache" / node_name
    shutil.rmtree(cache, ignore_errors=True)
    return cache


def sweeper(settings: Settings, parts: Parts) -> Sweeper:
    endings = Endings(parts.lifecycle, parts.records, parts.store, parts.doorbell.wake)
    chores: dict[str, Chore] = {
        "ringing": Ringing(parts.oplog, parts.doorbell.ring, settings.engine),
        "sessions": Sessions(parts.lifecycle, endings),
        "orphans": Orphans(parts.oplog, parts.lifecycle, parts.records, parts.store, settings.engine),
        "spilling": Spilling(parts.payloads),
        "accounting": Accounting(parts.pages, PageFiles(parts.store), parts.records),
    }
    return Sweeper(parts.oplog, chores, parts.worker)
