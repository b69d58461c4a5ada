"""The trainers' scan for models without an owner."""

from __future__ import annotations

import redis

from app.domain.records import Model
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import dump
from workers.train.scheduler import BacklogScan


def test_a_model_behind_a_thousand_that_are_stuck_is_found(client: redis.Redis) -> None:
    """The first thousand are of a base that no trainer serves."""
    oplog, model_id = RedisOpLog(client, EngineSettings()), "s:train:0"
    oplog.create_model(model_id, dump(Model("me", "s", "base", 0.0)))
    oplog.admit(model_id, 0, "forward", b"", "d")
    stuck = [f"other:train:{i}" for i in range(1000)]
    client.zadd(keys.PENDING, dict.fromkeys(stuck, 0))
    client.hset(keys.PENDING_QUEUE, mapping=dict.fromkeys(stuck, "train.other"))
    scan = BacklogScan(oplog, "train.base", share=1e9)
    assert [[head.model_id for head in scan.heads()] for _ in range(3)] == [[], [model_id], []]
