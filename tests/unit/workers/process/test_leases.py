from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import redis

from app.domain.records import Model
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.client import connect
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import dump
from app.stores.redis.types import Lease, OwnedElsewhere
from tests.servers import start_valkey
from workers.process import liveness
from workers.process.liveness import LeaseKeeper, PutOffs

MODEL = "session:train:0"


def await_true(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def prepared(client: redis.Redis, lease_s: float) -> RedisOpLog:
    oplog = RedisOpLog(client, EngineSettings(lease_s=lease_s))
    oplog.create_model(MODEL, dump(Model("me", "session", "base", 0.0)))
    assert isinstance(oplog.acquire(MODEL, "a/1"), Lease)
    return oplog


def test_a_kept_lease_outlives_its_time_and_a_dropped_one_does_not(client: redis.Redis):
    oplog = prepared(client, 3600)
    keeper = LeaseKeeper(oplog, "a/1", 0.3)
    keeper.add(MODEL, time.monotonic())
    for _ in range(3):
        client.pexpire(keys.lease(MODEL), 600_000)  # the lease has 10 of its 60 minutes left
        await_true(lambda: client.pttl(keys.lease(MODEL)) > 600_000)
    assert oplog.acquire(MODEL, "b/1") == OwnedElsewhere("a")
    keeper.drop(MODEL)

    def has_lapsed() -> bool:
        client.pexpire(keys.lease(MODEL), 500, lt=True)  # again: the last renewal may have been on its way
        return isinstance(oplog.acquire(MODEL, "b/1"), Lease)

    await_true(has_lapsed)
    keeper.stop()


def test_a_lease_that_was_taken_is_no_longer_held(client: redis.Redis):
    oplog = prepared(client, 3600)
    keeper = LeaseKeeper(oplog, "a/1", 0.3)
    keeper.add(MODEL, time.monotonic() + 3600)  # so that the lease does not expire
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
            keeper.add(MODEL, time.monotonic())
            asked.set()
        return lost

    monkeypatch.setattr(oplog, "renew", renew_late)
    keeper.add(MODEL, time.monotonic())
    oplog.release(MODEL, "a/1")
    assert asked.wait(60)
    keeper.stop()
    assert MODEL in keeper._renewed
    keeper.drop(MODEL)
    assert not keeper.holds(MODEL)


def test_a_keeper_without_an_answer_for_a_lease_time_holds_no_lease(tmp_path: Path):
    with start_valkey(tmp_path) as url:
        oplog = prepared(connect(url), 3600)
        keepers = [LeaseKeeper(oplog, "a/1", lease_s) for lease_s in (0.3, 3600.0)]
        for keeper in keepers:
            keeper.add(MODEL, time.monotonic())
    await_true(lambda: not keepers[0].holds(MODEL))
    assert keepers[1].holds(MODEL), "a lease of an hour is not over"
    for keeper in keepers:
        keeper.stop()


def test_a_lease_dropped_while_it_is_asked_about_stays_dropped(client: redis.Redis, monkeypatch: pytest.MonkeyPatch):
    oplog = prepared(client, 30)
    keeper = LeaseKeeper(oplog, "a/1", 30)
    renew = oplog.renew

    def dropped_meanwhile(ids: Sequence[str], worker: str) -> list[str]:
        keeper.drop(MODEL)
        return renew(ids, worker)

    monkeypatch.setattr(oplog, "renew", dropped_meanwhile)
    keeper.add(MODEL, time.monotonic())
    keeper._renew()
    assert not keeper.holds(MODEL)
    keeper.stop()


def test_a_lease_counts_from_when_it_was_asked_for(client: redis.Redis, monkeypatch: pytest.MonkeyPatch):
    """The server's time starts before its answer arrives, and the answer may be late."""
    oplog = prepared(client, 30)
    keeper = LeaseKeeper(oplog, "a/1", 30)
    renew, now = oplog.renew, [1000.0]

    def renew_late(ids: Sequence[str], worker: str) -> list[str]:
        lost = renew(ids, worker)
        now[0] += 31
        return lost

    monkeypatch.setattr(oplog, "renew", renew_late)
    monkeypatch.setattr(liveness.time, "monotonic", lambda: now[0])
    keeper.add(MODEL, time.monotonic())
    keeper._renew()
    assert not keeper.holds(MODEL)
    keeper.stop()


def test_a_lease_that_was_long_in_coming_counts_from_when_it_was_asked_for(client: redis.Redis):
    keeper = LeaseKeeper(prepared(client, 30), "a/1", 30)
    keeper.add(MODEL, time.monotonic() - 31)
    assert not keeper.holds(MODEL)
    keeper.stop()


def test_a_keeper_goes_on_after_an_outage(client: redis.Redis, monkeypatch: pytest.MonkeyPatch):
    oplog = prepared(client, 30)
    keeper = LeaseKeeper(oplog, "a/1", 0.03)
    renew, asked, again = oplog.renew, [0], threading.Event()

    def fail_once(ids: Sequence[str], worker: str) -> list[str]:
        asked[0] += 1
        if asked[0] == 1:
            raise redis.ConnectionError("away")
        again.set()
        return renew(ids, worker)

    monkeypatch.setattr(oplog, "renew", fail_once)
    keeper.add(MODEL, time.monotonic())
    assert again.wait(60)
    keeper.stop()


class CutOff:
    """Puts requests back as soon as the state server is reachable."""

    def __init__(self) -> None:
        self.reachable = threading.Event()
        self.back: list[str] = []

    def put_back(self, request_id: str) -> None:
        if not self.reachable.is_set():
            raise redis.ConnectionError
        self.back.append(request_id)


def test_what_could_not_be_put_back_is_put_back_with_the_next_renewal(client: redis.Redis):
    keeper, worker = LeaseKeeper(prepared(client, 30), "a/1", 0.03), CutOff()
    keeper.put_offs.add("left", partial(worker.put_back, "left"))
    worker.reachable.set()
    await_true(lambda: bool(worker.back))
    keeper.stop()
    assert worker.back == ["left"]


def test_a_request_begins_again_once_it_is_put_back_and_is_not_put_back_later():
    """Later, it would take away the mark that this worker runs it, and its death would not count."""
    put_offs, worker = PutOffs(), CutOff()
    put_offs.add("left", partial(worker.put_back, "left"))
    put_offs.begin("another")
    with pytest.raises(redis.ConnectionError):
        put_offs.begin("left")
    worker.reachable.set()
    put_offs.begin("left")
    assert worker.back == ["left"]
    put_offs.flush()
    assert worker.back == ["left"]
