from __future__ import annotations

import pytest
import redis

from app.domain.records import Model, dump
from app.settings import EngineSettings
from app.stores.redis.oplog import RedisOpLog
from tests.unit.app.stores.redis.journal import MODEL


@pytest.fixture
def oplog(client: redis.Redis) -> RedisOpLog:
    log = RedisOpLog(client, EngineSettings(lease_s=60))
    assert log.create_model(MODEL, dump(Model("me", "session", "base", 0.0)))
    return log
