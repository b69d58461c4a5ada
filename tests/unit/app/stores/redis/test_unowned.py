"""Models without an owner, of more that wait than one scan reads."""

from __future__ import annotations

import redis

from app.domain.records import Model
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import dump

QUEUE = "train.base"


def admit(oplog: RedisOpLog, client: redis.Redis, *bases: str) -> list[str]:
    """Admits a call of a model of each base, one after the other. Returns the models."""
    model_ids = [f"s:train:{i}" for i in range(len(bases))]
    for i, (model_id, base) in enumerate(zip(model_ids, bases, strict=True)):
        oplog.create_model(model_id, dump(Model("me", "s", base, 0.0)))
        oplog.admit(model_id, 0, "forward", b"", "d")
        client.zadd(keys.PENDING, {model_id: i})
    return model_ids


def scanned(oplog: RedisOpLog, pages: int, among: int = 2) -> list[list[str]]:
    return [[head.model_id for head in oplog.unowned(QUEUE, among, page)] for page in range(pages)]


def test_each_page_is_scanned_in_turn(oplog: RedisOpLog, client: redis.Redis) -> None:
    assert scanned(oplog, 2) == [[], []]
    found = admit(oplog, client, "other", "other", "base", "base", "base")
    assert scanned(oplog, 5) == [[], found[2:4], found[4:], [], found[2:4]]


def test_throttled_requests_have_no_pages(oplog: RedisOpLog, client: redis.Redis) -> None:
    (model_id,) = admit(oplog, client, "base")
    sampler = "s:sample:0"
    for seq in range(7):
        oplog.admit_sample(f"{sampler}:{seq}", sampler, "me", "sample.base", b"", "d", sequences=64)
    client.zrem(keys.PENDING, f"{sampler}:0")
    assert scanned(oplog, 3) == [[model_id]] * 3
    client.zrem(keys.PENDING, model_id)
    assert scanned(oplog, 3) == [[]] * 3


def test_a_model_that_cannot_be_read_hides_no_other(oplog: RedisOpLog, client: redis.Redis) -> None:
    broken, good = admit(oplog, client, "base", "base")
    client.hset(keys.model(broken), "applied", "no number")
    assert scanned(oplog, 1) == [[good]]
    client.delete(keys.model(broken))
    client.set(keys.model(broken), "no hash")
    assert scanned(oplog, 1) == [[good]]
