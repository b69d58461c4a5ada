from __future__ import annotations

from pathlib import Path

import pytest
import redis

from app.domain.records import Model
from app.domain.results import Result
from app.errors import Unavailable
from app.settings import EngineSettings
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.payloads import RedisPayloads
from app.stores.redis.records import dump
from app.stores.redis.types import Lease
from tests.unit.away_store import AwayStore
from workers.maintenance.leader import PayloadSpilling

MODEL = "session:train:0"
KB = 1024
SETTINGS = EngineSettings(payload_budget_bytes=400 * KB, spill_bytes=100 * KB)


@pytest.fixture
def store(tmp_path: Path) -> AwayStore:
    return AwayStore(tmp_path, "secret", "http://x")


@pytest.fixture
def oplog(client: redis.Redis, store: AwayStore) -> RedisOpLog:
    log = RedisOpLog(client, SETTINGS, store)
    assert log.create_model(MODEL, dump(Model("me", "session", "base", 0.0)))
    return log


@pytest.fixture
def spilling(client: redis.Redis, store: AwayStore) -> PayloadSpilling:
    return PayloadSpilling(RedisPayloads(client, SETTINGS, store))


def admit(oplog: RedisOpLog, seq: int, size: int) -> None:
    oplog.admit(MODEL, seq, "forward_backward", bytes([seq]) * size, f"digest {seq}")


def test_what_is_over_half_the_budget_moves_so_that_more_can_come_in(oplog, spilling, store, client):
    for seq in range(40):
        admit(oplog, seq, 90 * KB)
        spilling.sweep()
    assert int(client.get("tinsmith:payload_bytes")) <= 200 * KB
    assert len(store.list("payloads")) == 38
    lease = oplog.acquire(MODEL, "a/1")
    assert isinstance(lease, Lease)
    for seq in range(40):
        assert oplog.next(lease, seq).payload == bytes([seq]) * 90 * KB
        oplog.commit(lease, seq, Result(b"{}"))
    oplog.set_snapshot(lease, 39, "s")
    spilling.sweep()
    assert (store.list("payloads"), client.keys("*spill*")) == ([], [])


def test_with_the_store_away_only_what_is_over_the_budget_waits_until_it_is_back(oplog, spilling, store):
    store.away = True
    for seq in range(4):
        admit(oplog, seq, 90 * KB)
    with pytest.raises(Unavailable):
        spilling.sweep()
    with pytest.raises(Unavailable):
        admit(oplog, 4, 90 * KB)
    lease = oplog.acquire(MODEL, "a/1")
    oplog.commit(lease, 0, Result(b"{}"))
    assert oplog.next(lease, 1).payload == b"\1" * 90 * KB, "training goes on"
    store.away = False
    spilling.sweep()
    admit(oplog, 4, 90 * KB)
    assert len(store.list("payloads")) == 2
