from __future__ import annotations

import pytest
import redis

from app.domain.records import Model, Sampler
from app.settings import EngineSettings
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords, dump
from tests.unit.app.stores.redis.journal_steps import MODEL


@pytest.fixture
def oplog(client: redis.Redis) -> RedisOpLog:
    log = RedisOpLog(client, EngineSettings(lease_s=60))
    assert log.create_model(MODEL, dump(Model("me", "session", "base", 0.0)))
    RedisRecords(client).put_new(Sampler.namespace, "s:sample:0", dump(Sampler("me", "s", "base", 0.0)))
    return log
