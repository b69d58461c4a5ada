"""A session with a run and a sampler, and calls that are charged to a project and a key."""

from __future__ import annotations

import pytest
import redis

from app.domain.limits import KEY, PROJECT, Charge, Limits, Payer
from app.domain.records import Model, Sampler, Session
from app.settings import EngineSettings
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.limits import RedisQuotas
from app.stores.redis.records import RedisRecords, dump

SETTINGS = EngineSettings()
SESSION = "session"
MODEL, SAMPLER = f"{SESSION}:train:0", f"{SESSION}:sample:0"
NONE = Limits()


@pytest.fixture
def stored(client: redis.Redis) -> RedisRecords:
    records = RedisRecords(client)
    records.put_new(Session.namespace, SESSION, dump(Session("me", 0.0)))
    records.put_new(Sampler.namespace, SAMPLER, dump(Sampler("me", SESSION, "base", 0.0)))
    return records


@pytest.fixture
def oplog(client: redis.Redis, stored: RedisRecords) -> RedisOpLog:
    log = RedisOpLog(client, SETTINGS)
    assert log.create_model(MODEL, dump(Model("me", SESSION, "base", 0.0, key="k")))
    RedisLifecycle(client, SETTINGS).heartbeat(SESSION)
    return log


@pytest.fixture
def quotas(client: redis.Redis) -> RedisQuotas:
    return RedisQuotas(client, SETTINGS)


def mine(limits: Limits = NONE, key: Limits = NONE) -> tuple[Payer, Payer]:
    return Payer(PROJECT, "me", limits), Payer(KEY, "k", key)


def ask(oplog: RedisOpLog, seq: int, charge: Charge, kind: str = "forward_backward") -> bool:
    return oplog.admit(MODEL, seq, kind, b"payload", f"digest {seq}", charge=charge).fresh
