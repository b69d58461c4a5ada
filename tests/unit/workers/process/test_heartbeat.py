"""A worker's record states its capabilities, for as long as they hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import redis

from app.domain.records import LAST_WORKERS, BaseModelInfo, Demand, Refusal, Worker
from app.settings import EngineSettings
from app.stores.redis import durability, keys
from app.stores.redis.records import RedisRecords, dump, load
from app.stores.redis.types import Entry
from workers.maintenance.leader import MaintenanceRunner
from workers.process import liveness, telemetry
from workers.process.liveness import Heartbeat, Watchdog
from workers.process.runtime import Runtime
from workers.process.telemetry import ServiceTime

INFO = BaseModelInfo("base", "Qwen3ForCausalLM", 320, 512, "float32", ("attn",))


@pytest.fixture
def made(client: redis.Redis) -> Iterator[Heartbeat]:
    records = RedisRecords(client)
    made = Heartbeat(records, "s", "sampler", INFO, dict, "", lambda: True, "sample.base", batch=4, holds=9)
    made.start()
    yield made
    made.stop()


def record(client: redis.Redis) -> Worker | None:
    stored = RedisRecords(client).get(Worker.namespace, "s")
    return load(Worker, stored) if stored else None


def await_true(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def test_it_says_which_queue_is_read_and_how_much_is_taken_and_lapses_by_itself(client, made):
    await_true(lambda: record(client) is not None)
    worker = record(client)
    assert (worker.queue, worker.batch, worker.holds, worker.healthy) == ("sample.base", 4, 9, True)
    assert 0 < client.pttl(keys.record(Worker.namespace, "s")) <= liveness.LIFE_S * 1000


def test_a_worker_that_has_started_is_demanded_no_more(client):
    records = RedisRecords(client)
    for role in ("trainer", "sampler"):
        records.put_demand(role, "base")
    made = Heartbeat(records, "s", "sampler", INFO, dict, "", lambda: True, "sample.base")
    made.start()
    await_true(lambda: [key for key, _ in records.list(Demand.namespace)] == ["trainer/base"])
    records.put_demand("sampler", "base")
    made.refresh()
    await_true(lambda: record(client) is not None)
    made.stop()
    assert {key for key, _ in records.list(Demand.namespace)} == {"sampler/base", "trainer/base"}


def refuse(records: RedisRecords) -> None:
    for role in ("trainer", "sampler"):
        records.put(Refusal.namespace, Refusal.id(role, "base"), dump(Refusal(role, "base", "it was another model")))


def refused(client: redis.Redis) -> list[str]:
    return [key for key, _ in RedisRecords(client).list(Refusal.namespace)]


def test_a_worker_that_has_started_takes_back_the_refusal_of_its_role(client):
    records = RedisRecords(client)
    refuse(records)
    made = Heartbeat(records, "s", "sampler", INFO, dict, "", lambda: True, "sample.base")
    made.start()
    await_true(lambda: refused(client) == ["trainer/base"])
    made.stop()


@pytest.fixture
def unreplicated(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Heartbeat]:
    """The heartbeat of a worker that has started with engine.replicas, while no replica was there."""
    monkeypatch.setattr(durability, "_WAIT_MS", 1)
    records = RedisRecords(client, EngineSettings(replicas=1))
    refuse(records)
    unreplicated = Heartbeat(records, "s", "sampler", INFO, dict, "", lambda: True, "sample.base")
    unreplicated.start()
    await_true(lambda: refused(client) == ["trainer/base"])
    yield unreplicated
    unreplicated.stop()


def test_the_heartbeat_of_a_worker_goes_on_while_a_replica_is_away(client, unreplicated):
    client.delete(keys.record(Worker.namespace, "s"))
    unreplicated.refresh()
    await_true(lambda: record(client) is not None)


def test_what_a_worker_takes_back_at_its_start_it_takes_back_once_while_a_replica_is_away(client, unreplicated):
    RedisRecords(client).put_demand("sampler", "base")
    client.delete(keys.record(Worker.namespace, "s"))
    unreplicated.refresh()
    await_true(lambda: record(client) is not None)
    unreplicated.stop()
    assert [key for key, _ in RedisRecords(client).list(Demand.namespace)] == ["sampler/base"]


def test_an_orderly_stop_closes_the_worker_while_a_replica_is_away(client, unreplicated):
    absent: Any = None
    closed: list[bool] = []
    watchdog, maintenance = Watchdog(absent, lambda: True, 60.0, absent), MaintenanceRunner(absent, {}, "s/1")
    Runtime(absent, absent, "", unreplicated, watchdog, maintenance, absent, lambda: closed.append(True)).stop()
    assert closed
    assert record(client) is None


def test_a_heartbeat_that_fails_is_one_line_and_the_next_one_is_sent(client, made, caplog: pytest.LogCaptureFixture):
    await_true(lambda: record(client) is not None)
    failures = iter([KeyError("devices"), KeyError("devices"), None, KeyError("devices")])
    described: list[bool] = []

    def describe() -> Mapping[str, Any]:
        described.append(True)
        if failure := next(failures, None):
            raise failure
        return {"devices": ["cpu"]}

    made._describe = describe
    for beats in (1, 2, 3, 4, 5):
        made.refresh()
        await_true(lambda beats=beats: len(described) >= beats)
    await_true(lambda: record(client).describe == {"devices": ["cpu"]})
    assert [line.getMessage() for line in caplog.records] == ["could not send the heartbeat: 'devices'"] * 2


LATER_FACTS = {"reads_images", "follows_schemas"}


@pytest.mark.parametrize("role", ["trainer", "full_trainer"])
def test_a_trainer_says_that_it_restores_pending_gradients(client, made, role):
    made._role = role
    made.refresh()
    await_true(lambda: record(client) is not None and record(client).describe == {"reads_gradients": True})


def test_it_says_what_a_model_reads_and_follows_where_earlier_versions_do_not_look(client, made):
    """An API process of an earlier version builds its BaseModelInfo from every field of `info`."""
    await_true(lambda: record(client) is not None)
    assert (record(client).describe, LATER_FACTS & record(client).info.keys()) == ({}, set())
    made._info = replace(INFO, reads_images=True, follows_schemas=True)
    made.refresh()
    await_true(lambda: record(client).describe == {"reads_images": True, "follows_schemas": True})
    assert not LATER_FACTS & record(client).info.keys()


def test_it_says_how_long_a_call_takes_it(client, made, monkeypatch):
    monkeypatch.setattr(telemetry, "SERVICE_TIME", ServiceTime())
    entry = Entry(1, "sample", "s:sample:0:1", b"", "", 0)
    telemetry.op_done(entry, failed=False, run_s=3.0, commit_s=1.0)
    made.refresh()
    await_true(lambda: record(client) is not None and record(client).pace_s == 4.0)


def test_a_worker_that_is_asked_to_end_is_sent_nothing_more_while_it_finishes(client, made):
    await_true(lambda: record(client) is not None)
    made.leave()
    await_true(lambda: not record(client).healthy)


def test_one_that_ended_is_gone_at_once_and_its_facts_stay(client, made):
    last = keys.record(LAST_WORKERS, "sampler/base")
    await_true(lambda: record(client) is not None and client.exists(last))
    before = record(client)
    made.stop()
    assert record(client) is None
    stored = RedisRecords(client).get(LAST_WORKERS, "sampler/base")
    assert load(Worker, stored) == before
    assert client.pttl(last) == -1


def test_a_record_that_is_being_written_when_its_worker_ends_does_not_come_back(client, made, monkeypatch):
    monkeypatch.setattr(liveness, "_LAST_BEAT_S", 60.0)
    await_true(lambda: record(client) is not None)
    describing, stopping = threading.Event(), threading.Event()

    def describe() -> Mapping[str, Any]:
        describing.set()
        stopping.wait(60)
        return {}

    made._describe = describe
    made.refresh()
    assert describing.wait(60)
    stop = threading.Thread(target=made.stop)
    stop.start()
    await_true(lambda: made._stopped)
    stop.join(0.5)  # a stop that does not wait for the beat deletes the record now
    stopping.set()
    stop.join(60)
    made._thread.join(60)
    assert record(client) is None


def test_a_heartbeat_that_never_started_stops(client):
    Heartbeat(RedisRecords(client), "s", "sampler", INFO, dict, "", lambda: True, "sample.base").stop()
