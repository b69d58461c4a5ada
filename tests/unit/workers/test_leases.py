from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import redis

from app.domain.records import Model, dump
from app.settings import EngineSettings
from app.stores.interfaces import HeldElsewhere, Lease
from app.stores.redis import keys
from app.stores.redis.client import connect
from app.stores.redis.oplog import RedisOpLog
from tests.servers import start_valkey
from workers.leases import LeaseKeeper

MODEL = "session:train:0"


def await_true(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def prepared(client: redis.Redis, lease_s: float) -> RedisOpLog:
    oplog = RedisOpLog(client, EngineSettings(lease_s=lease_s))
    oplog.create_model(MODEL, dump(Model("me", "session", "base", 0.0)))
    assert isinstance(oplog.acquire(MODEL, "a/1"), Lease)
    return oplog


def test_a_kept_lease_outlives_its_time_and_a_dropped_one_does_not(client: redis.Redis):
    oplog = prepared(client, 0.3)
    keeper = LeaseKeeper(oplog, "a/1", 0.3)
    keeper.add(MODEL)
    renewed = client.pttl(keys.lease(MODEL))
    await_true(lambda: client.pttl(keys.lease(MODEL)) < renewed - 50)
    await_true(lambda: client.pttl(keys.lease(MODEL)) > 250)
    assert oplog.acquire(MODEL, "b/1") == HeldElsewhere("a")
    keeper.drop(MODEL)
    await_true(lambda: isinstance(oplog.acquire(MODEL, "b/1"), Lease))
    keeper.stop()


def test_a_lease_that_was_taken_is_no_longer_held(client: redis.Redis):
    oplog = prepared(client, 0.3)
    keeper = LeaseKeeper(oplog, "a/1", 0.3)
    keeper.add(MODEL)
    oplog.acquire(MODEL, "a/2")
    await_true(lambda: not keeper.holds(MODEL))
    keeper.stop()


def test_a_lease_gained_anew_while_the_old_one_is_asked_about_stays(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
):
    oplog = prepared(client, 30)
    keeper = LeaseKeeper(oplog, "a/1", 0.3)
    asked = threading.Event()
    renew = oplog.renew

    def renew_late(ids: Sequence[str], worker: str) -> list[str]:
        lost = renew(ids, worker)
        if lost:
            assert isinstance(oplog.acquire(MODEL, "a/1"), Lease)
            keeper.add(MODEL)
            asked.set()
        return lost

    monkeypatch.setattr(oplog, "renew", renew_late)
    keeper.add(MODEL)
    oplog.release(MODEL, "a/1")
    assert asked.wait(60)
    keeper.stop()
    assert MODEL in keeper._renewed
    keeper.drop(MODEL)
    assert not keeper.holds(MODEL)


def test_a_keeper_that_hears_nothing_for_a_lease_holds_nothing(tmp_path: Path):
    with start_valkey(tmp_path) as url:
        oplog = prepared(connect(url), 0.3)
        keeper = LeaseKeeper(oplog, "a/1", 0.3)
        keeper.add(MODEL)
        assert keeper.holds(MODEL)
    await_true(lambda: not keeper.holds(MODEL))
    keeper.stop()
