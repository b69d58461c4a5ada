"""Redispatch of more than one round reads, and into the queues that only one trainer reads."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest
import redis

from app.dispatch import Dispatcher, celery_app
from app.domain.records import Model, Sampler
from app.domain.results import Result
from app.settings import EngineSettings, RedisSettings, Settings
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords, dump
from workers.maintenance.redispatch import Redispatcher

HASTY = EngineSettings(lease_s=3600, ring_again_s=1e-6, gap_s=1e9)
QUEUE, NODE = "train.base", "trainer-1"
DIRECT = f"{QUEUE}@{NODE}"
LAST = "session:train:9"


@pytest.fixture
def oplog(client: redis.Redis) -> RedisOpLog:
    log = RedisOpLog(client, HASTY)
    log.take_calls(600)
    return log


@pytest.fixture
def dispatched() -> list[str]:
    """The ids of the models and samplers to which dispatches went."""
    return []


@pytest.fixture
def redispatcher(oplog: RedisOpLog, client: redis.Redis, dispatched: list[str]) -> Redispatcher:
    return Redispatcher(oplog, lambda *send: dispatched.append(send[2]), HASTY, client)


def admit(oplog: RedisOpLog, client: redis.Redis, model_id: str, base: str = "base", calls: int = 1) -> None:
    """Admits calls that have waited long by now, one model after the other."""
    oplog.create_model(model_id, dump(Model("me", "session", base, 0.0)))
    for seq in range(calls):
        oplog.admit(model_id, seq, "forward", b"", f"d{seq}")
    client.zadd(keys.PENDING, {model_id: client.zcard(keys.PENDING)})


def read_two_rows_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.maintenance.redispatch._SLICE", 2)
    monkeypatch.setattr("workers.maintenance.redispatch._MOST", 2)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round may dispatch again."""
    monkeypatch.setattr("workers.maintenance.redispatch._LONGEST_PATIENCE_S", 0.0)


@pytest.mark.usefixtures("eager")
def test_however_many_are_stuck_the_others_have_their_rounds(
    oplog: RedisOpLog,
    redispatcher: Redispatcher,
    client: redis.Redis,
    dispatched: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first models are of a base that no trainer serves."""
    read_two_rows_a_round(monkeypatch)
    for i in range(4):
        admit(oplog, client, f"session:train:{i}", "unserved")
    admit(oplog, client, LAST)
    for _ in range(6):
        redispatcher.sweep()
    assert dispatched.count(LAST) == 2
    assert dispatched.count("session:train:0") == 2


@pytest.mark.usefixtures("eager")
def test_once_the_others_have_ended_the_first_row_is_read_at_once(
    oplog: RedisOpLog,
    redispatcher: Redispatcher,
    client: redis.Redis,
    dispatched: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_two_rows_a_round(monkeypatch)
    admit(oplog, client, LAST)
    for i in range(3):
        admit(oplog, client, f"session:train:{i}")
    redispatcher.sweep()
    client.zremrangebyrank(keys.PENDING, 1, -1)
    dispatched.clear()
    redispatcher.sweep()
    assert dispatched == [LAST]


@pytest.mark.usefixtures("eager")
def test_however_many_are_throttled_what_is_before_them_is_read_in_every_round(
    oplog: RedisOpLog,
    redispatcher: Redispatcher,
    client: redis.Redis,
    dispatched: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_two_rows_a_round(monkeypatch)
    sampler = "s:sample:0"
    RedisRecords(client).put_new(Sampler.namespace, sampler, dump(Sampler("me", "s", "base", 0.0)))
    for seq in range(6):
        oplog.admit_sample(f"{sampler}:{seq}", sampler, "me", "sample.base", b"", "d", sequences=64)
    client.zadd(keys.PENDING, {f"{sampler}:0": 1})
    for _ in range(3):
        redispatcher.sweep()
    assert dispatched == [sampler] * 3


@pytest.mark.usefixtures("eager")
def test_however_many_are_throttled_of_one_queue_those_of_another_are_dispatched(
    oplog: RedisOpLog,
    redispatcher: Redispatcher,
    client: redis.Redis,
    dispatched: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_two_rows_a_round(monkeypatch)
    for base in ("unserved", "base"):
        sampler = f"{base}:sample:0"
        RedisRecords(client).put_new(Sampler.namespace, sampler, dump(Sampler("me", "s", base, 0.0)))
        for seq in range(6):
            oplog.admit_sample(f"{sampler}:{seq}", sampler, "me", f"sample.{base}", b"", "d", sequences=64)
    oplog.finish_sample("base:sample:0:0", Result(b""))  # its worker died before it dispatched the next one
    redispatcher.sweep()
    assert "base:sample:0" in dispatched


@pytest.mark.usefixtures("eager")
def test_a_queue_has_room_for_all_that_wait_for_it_whichever_round_reads_them(
    oplog: RedisOpLog,
    redispatcher: Redispatcher,
    client: redis.Redis,
    dispatched: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_two_rows_a_round(monkeypatch)
    monkeypatch.setattr("workers.maintenance.redispatch._LONGEST_QUEUE", 0)
    for i in range(3):
        admit(oplog, client, f"session:train:{i}")
    client.rpush(QUEUE, *["message"] * 3)  # two of each of the first two models have room for one more
    redispatcher.sweep()
    redispatcher.sweep()
    assert "session:train:2" in dispatched


def test_a_model_that_some_rounds_do_not_read_is_dispatched_no_more_often(
    oplog: RedisOpLog, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_two_rows_a_round(monkeypatch)
    for i in range(3):
        admit(oplog, client, f"session:train:{i}")
    admit(oplog, client, LAST)
    clock = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    at: list[float] = []
    settings = EngineSettings(lease_s=3600, ring_again_s=8, gap_s=1e9)
    redispatcher = Redispatcher(oplog, lambda *send: at.append(clock) if send[2] == LAST else None, settings, client)
    for _ in range(100):
        clock += 2
        redispatcher.sweep()
    assert [after - before for before, after in pairwise(at)] == [8, 16, 32, 60, 60]


def test_a_call_that_has_ended_is_forgotten(
    oplog: RedisOpLog, redispatcher: Redispatcher, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    admit(oplog, client, LAST)
    redispatcher.sweep()
    assert [*redispatcher._last] == [LAST]
    client.delete(keys.PENDING)
    clock += 3600
    redispatcher.sweep()
    assert not redispatcher._last


def test_a_call_of_a_model_with_an_owner_is_dispatched_to_it(oplog: RedisOpLog, client: redis.Redis) -> None:
    """As the API dispatches it; another trainer would only forward it."""
    for i in range(2):
        admit(oplog, client, f"session:train:{i}")
    oplog.acquire("session:train:0", f"{NODE}/1")
    queues: dict[str, str] = {}
    Redispatcher(oplog, lambda *send: queues.update({send[2]: send[3]}), HASTY, client).sweep()
    assert queues == {"session:train:0": DIRECT, "session:train:1": QUEUE}


def test_a_sampling_request_that_a_worker_began_is_dispatched_to_all_of_them(
    oplog: RedisOpLog, client: redis.Redis
) -> None:
    """Its worker may have dropped it, and then any can run it."""
    request = "s:sample:0:0"
    RedisRecords(client).put_new(Sampler.namespace, "s:sample:0", dump(Sampler("me", "s", "base", 0.0)))
    oplog.admit_sample(request, "s:sample:0", "me", "sample.base", b"", "d")
    oplog.claim_sample(request, "sampler/1")
    client.zadd(keys.PENDING, {request: 1})
    queues: list[str] = []
    Redispatcher(oplog, lambda *send: queues.append(send[3]), HASTY, client).sweep()
    assert queues == ["sample.base"]


@pytest.mark.usefixtures("eager")
def test_the_queue_of_a_trainer_in_a_long_pass_does_not_grow_whoever_forwards_to_it(
    oplog: RedisOpLog, client: redis.Redis, valkey: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle trainer reads the shared queue, and forwards each message to the owner of its model."""
    monkeypatch.setattr("workers.maintenance.redispatch._LONGEST_QUEUE", 10)
    for i in range(3):
        admit(oplog, client, f"session:train:{i}", calls=5)
        oplog.acquire(f"session:train:{i}", f"{NODE}/1")
    celery = celery_app(Settings(data_dir=tmp_path, redis=RedisSettings(url=valkey, broker_url=valkey)))
    redispatcher = Redispatcher(oplog, Dispatcher(celery).send, HASTY, client)
    for _ in range(20):
        redispatcher.sweep()
        while client.rpoplpush(QUEUE, DIRECT):
            pass
    assert client.llen(DIRECT) == 10
