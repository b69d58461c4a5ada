"""Redispatch of calls that wait too long, and the end of gaps."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import redis
from celery import Celery

from app.dispatch import Dispatcher, celery_app
from app.domain.records import Model, Sampler
from app.domain.results import Result
from app.errors import BadRequest
from app.settings import EngineSettings, RedisSettings, Settings
from app.stores.objects.folder import FolderStore
from app.stores.redis import keys
from app.stores.redis.client import connect
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords, dump
from app.stores.redis.types import Lease
from tests.assembly import parts
from tests.servers import free_port
from workers.maintenance.redispatch import Redispatcher
from workers.process.parts import create_maintenance

MODEL = "session:train:0"
PATIENT = EngineSettings(lease_s=3600, ring_again_s=60, gap_s=300)
HASTY = EngineSettings(lease_s=3600, ring_again_s=1e-6, gap_s=1e-6)


@pytest.fixture
def oplog(client: redis.Redis) -> RedisOpLog:
    log = RedisOpLog(client, PATIENT)
    log.take_calls(600)
    log.create_model(MODEL, dump(Model("me", "session", "base", 0.0)))
    RedisRecords(client).put_new(Sampler.namespace, "s:sample:0", dump(Sampler("me", "s", "base", 0.0)))
    return log


def await_waiting(oplog: RedisOpLog) -> None:
    """Waits until each pending request has waited: the server counts whole milliseconds."""
    while any(pending.waited_s == 0 for pending in oplog.pending()):
        time.sleep(0.001)


def swept(oplog: RedisOpLog, client: redis.Redis, settings: EngineSettings, times: int = 1) -> list[tuple[str, ...]]:
    await_waiting(oplog)
    dispatched: list[tuple[str, ...]] = []
    redispatcher = Redispatcher(oplog, lambda *send: dispatched.append(send), settings, client)
    oplog.calls_taken_s()
    time.sleep(0.002)  # time before the first look does not count for a gap
    for _ in range(times):
        redispatcher.sweep()
    return dispatched


def test_an_op_whose_dispatch_was_lost_is_dispatched_again(oplog, client):
    oplog.admit(MODEL, 0, "create_model", b"", "d")
    oplog.admit_sample("s:sample:0:4", "s:sample:0", "me", "sample.base", b"", "d")
    assert sorted(swept(oplog, client, HASTY)) == [
        ("create_model", f"{MODEL}:0", MODEL, "train.base"),
        ("sample", "s:sample:0:4", "s:sample:0", "sample.base"),
    ]


def test_everything_whose_dispatches_were_lost_is_dispatched_at_once_and_then_ever_more_rarely(oplog, client):
    for seq in range(5):
        oplog.admit(MODEL, seq, "forward_backward", b"", f"d{seq}")
    dispatched = swept(oplog, client, HASTY.model_copy(update={"ring_again_s": 1e-4}), times=20)
    assert [request for _, request, _, _ in dispatched[:5]] == [f"{MODEL}:{seq}" for seq in range(5)]
    assert len(dispatched) < 5 * 20


def test_however_long_it_waits_it_is_dispatched_again_every_minute(oplog, monkeypatch, client):
    oplog.admit(MODEL, 0, "create_model", b"", "d")
    clock = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    dispatched: list[float] = []
    settings = EngineSettings(lease_s=3600, ring_again_s=1e-6, gap_s=300)
    redispatcher = Redispatcher(oplog, lambda *_: dispatched.append(clock), settings, client)
    for _ in range(1000):
        clock += 5
        redispatcher.sweep()
    assert {after - before for before, after in pairwise(dispatched[-5:])} == {60}


def test_an_op_whose_worker_died_is_dispatched_again_soon_however_long_it_had_run(oplog, client, monkeypatch):
    oplog.admit(MODEL, 0, "create_model", b"", "d")
    lease = oplog.acquire(MODEL, "node/1")
    oplog.next(lease, 0)
    dispatched: list[tuple[str, ...]] = []
    settings = EngineSettings(lease_s=3600, ring_again_s=1e-3, gap_s=300)
    redispatcher = Redispatcher(oplog, lambda *send: dispatched.append(send), settings, client)
    clock = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    for _ in range(200):
        redispatcher.sweep()
        clock += 5
    oplog.release(MODEL, "node/1")
    dispatched.clear()
    redispatcher.sweep()
    assert dispatched == [("create_model", f"{MODEL}:0", MODEL, "train.base")]


def test_what_waits_briefly_is_left_alone(oplog, client):
    oplog.admit(MODEL, 0, "create_model", b"", "d")
    assert swept(oplog, client, PATIENT) == []


def test_a_clock_that_was_set_back_delays_no_dispatch(oplog, client):
    oplog.admit(MODEL, 0, "create_model", b"", "d")
    client.zincrby(keys.PENDING, 3_600_000, MODEL)  # the server's clock was set back by an hour since
    assert len(swept(oplog, client, PATIENT, times=2)) == 1


def test_an_op_that_runs_is_given_six_times_as_long(oplog, client):
    oplog.admit(MODEL, 0, "create_model", b"", "d")
    lease = oplog.acquire(MODEL, "a/1")
    assert isinstance(lease, Lease)
    oplog.next(lease, 0)
    client.zincrby(keys.PENDING, -180_000, MODEL)  # the call has waited for three minutes
    assert swept(oplog, client, PATIENT) == []
    client.zincrby(keys.PENDING, -180_000, MODEL)
    assert len(swept(oplog, client, PATIENT)) == 1


def test_an_op_that_a_dead_worker_had_begun_is_dispatched_again(oplog, client):
    oplog.admit(MODEL, 0, "create_model", b"", "d")
    lease = oplog.acquire(MODEL, "a/1")
    assert isinstance(lease, Lease)
    oplog.next(lease, 0)
    client.delete(keys.lease(MODEL))
    client.zincrby(keys.PENDING, -180_000, MODEL)  # too short a wait for an Op that runs
    assert len(swept(oplog, client, PATIENT)) == 1


def test_an_op_that_an_earlier_process_of_its_owner_had_begun_is_dispatched_again(oplog, client):
    oplog.admit(MODEL, 0, "create_model", b"", "d")
    lease = oplog.acquire(MODEL, "a/1")
    assert isinstance(lease, Lease)
    oplog.next(lease, 0)
    oplog.acquire(MODEL, "a/2")
    client.zincrby(keys.PENDING, -180_000, MODEL)  # too short a wait for an Op that runs
    assert len(swept(oplog, client, PATIENT)) == 1


def test_all_of_very_many_models_are_dispatched(oplog, monkeypatch, client):
    monkeypatch.setattr("workers.maintenance.redispatch._SLICE", 3)
    models = {f"session:train:{i}" for i in range(10)}
    for model_id in models:
        oplog.create_model(model_id, dump(Model("me", "session", "base", 0.0)))
        oplog.admit(model_id, 0, "create_model", b"", "d")
    assert {model_id for _, _, model_id, _ in swept(oplog, client, HASTY)} == models


def test_time_that_nobody_saw_does_not_count_for_a_gap(oplog, client):
    """The redispatcher waited for an outage, or the machine slept: its own clock may have stood still meanwhile."""
    oplog.admit(MODEL, 1, "forward_backward", b"", "d")
    redispatcher = Redispatcher(oplog, lambda *_: None, PATIENT, client)
    hour_ago = int(client.time()[0]) * 1000 - 3_600_000
    client.zadd(keys.PENDING, {MODEL: hour_ago})
    client.hset(keys.CALLS_TAKEN, mapping={"since": hour_ago - 3_600_000, "seen": hour_ago})
    redispatcher.sweep()
    redispatcher.sweep()
    assert oplog.pending()[0].kinds == (), "an hour's outage was no time to come in"
    client.hset(keys.CALLS_TAKEN, "since", hour_ago)
    redispatcher.sweep()
    assert oplog.pending()[0].kinds


def test_a_gap_is_given_up_although_the_servers_clock_was_set_back_since_it_was_found(oplog, client):
    oplog.admit(MODEL, 1, "forward_backward", b"", "d")
    redispatcher = Redispatcher(oplog, lambda *_: None, PATIENT, client)
    now = int(client.time()[0]) * 1000
    client.zadd(keys.PENDING, {MODEL: now + 3_600_000})
    for taken_s, given_up in ((200, False), (400, True)):
        client.hset(keys.CALLS_TAKEN, mapping={"since": now - taken_s * 1000, "seen": now})
        redispatcher.sweep()
        assert bool(oplog.pending()[0].kinds) == given_up


def test_time_in_which_no_api_was_there_does_not_count_for_a_gap(oplog, client):
    oplog.admit(MODEL, 1, "forward_backward", b"", "d")
    client.delete(keys.TAKING_CALLS)
    assert swept(oplog, client, HASTY, times=2) == []
    oplog.take_calls(600)
    assert len(swept(oplog, client, HASTY, times=2)) == 2


def test_all_that_is_missing_in_a_row_is_given_up_together(oplog, client):
    oplog.admit(MODEL, 5, "optim_step", b"", "d")
    assert [request for _, request, _, _ in swept(oplog, client, HASTY, times=2)] == [
        f"{MODEL}:{seq}" for seq in range(6)
    ]
    assert oplog.entry(MODEL, 6) is None, "nothing waits behind it"


def test_of_very_many_that_are_missing_only_so_many_are_given_up_in_one_round(oplog, monkeypatch, client):
    monkeypatch.setattr("workers.maintenance.redispatch._GAP_MOST", 3)
    oplog.admit(MODEL, 5, "optim_step", b"", "d")
    swept(oplog, client, HASTY)
    assert [oplog.entry(MODEL, seq) is not None for seq in range(6)] == [True, True, True, False, False, True]


def test_a_gap_within_its_time_holds_and_one_past_it_is_given_up(oplog, client):
    oplog.admit(MODEL, 1, "forward_backward", b"", "d")
    assert swept(oplog, client, PATIENT) == []
    assert oplog.pending()[0].kinds == ()
    dispatched = swept(oplog, client, HASTY, times=2)
    assert dispatched == [
        ("drop_gradients", f"{MODEL}:0", MODEL, "train.base"),
        ("forward_backward", f"{MODEL}:1", MODEL, "train.base"),
    ]
    reason = oplog.entry(MODEL, 1).doomed
    assert reason.startswith("seq_id 0 did not arrive")
    assert "the SDK may have raised an error for the missing call" in reason
    with pytest.raises(BadRequest):
        oplog.admit(MODEL, 0, "create_model", b"", "d")


def test_a_request_its_sampler_does_not_begin_on_is_dispatched_all_within_seconds(oplog, client):
    """The sampler has room and died, or is stalled. The request must not wait elsewhere as if it were in a queue."""
    client.hset("tinsmith:workers:a", mapping={"queue": '"sample.base"', "healthy": "true", "batch": "8", "holds": "8"})
    client.zadd("tinsmith:index:workers", {"a": 0})
    for seq, late in ((4, 3_000), (5, -2_500)):
        request = f"s:sample:0:{seq}"
        assert oplog.admit_sample(request, "s:sample:0", "me", "sample.base", b"", "d").node == "a"
        client.zincrby(keys.PENDING, -late, request)
    assert swept(oplog, client, PATIENT) == [("sample", "s:sample:0:4", "s:sample:0", "sample.base")]
    oplog.claim_sample("s:sample:0:4", "a/1")
    assert swept(oplog, client, PATIENT) == []


def test_what_is_throttled_is_not_dispatched_until_there_is_room_and_then_once_by_redispatch(oplog, client):
    """The worker that finished a request of the project died before it could dispatch the next one."""
    sampler = "s:sample:0"
    for seq in range(3):
        oplog.admit_sample(f"{sampler}:{seq}", sampler, "me", "sample.base", b"", "d", sequences=64)
    assert [send[1] for send in swept(oplog, client, HASTY)] == [f"{sampler}:0"]
    oplog.finish_sample(f"{sampler}:0", Result(b""))
    assert ("sample", f"{sampler}:1", sampler, "sample.base") in swept(oplog, client, PATIENT)
    assert not [row for row in oplog.pending() if row.id == f"{sampler}:1" and row.throttled]
    assert [row.id for row in oplog.pending() if row.throttled] == [f"{sampler}:2"]


def test_what_a_dead_sampler_had_is_dispatched_again_however_much_is_throttled_since_before(oplog, client, monkeypatch):
    """Otherwise the project would wait forever: a throttled request waits for one of these requests to end, and no
    worker would start them again."""
    monkeypatch.setattr("workers.maintenance.redispatch._SLICE", 2)
    monkeypatch.setattr("workers.maintenance.redispatch._MOST", 4)
    sampler = "s:sample:0"
    for seq in range(7):
        oplog.admit_sample(f"{sampler}:{seq}", sampler, "me", "sample.base", b"", "d", sequences=64)
    oplog.finish_sample(f"{sampler}:0", Result(b""))
    assert [request_id for request_id, _ in oplog.release_samples("sample.base")] == [f"{sampler}:1"]
    assert f"{sampler}:1" in [send[1] for send in swept(oplog, client, HASTY)]
    assert all(0 <= row.waited_s < 60 for row in oplog.pending())


QUEUE = "train.base"


@pytest.fixture
def celery(valkey: str, tmp_path: Path, client: redis.Redis) -> Celery:
    """The broker is the state server's own database, so that `client` sees both."""
    return celery_app(Settings(data_dir=tmp_path, redis=RedisSettings(url=valkey, broker_url=valkey)))


@pytest.fixture
def dispatcher(celery: Celery, monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    """Every sweep may dispatch again."""
    monkeypatch.setattr("workers.maintenance.redispatch._LONGEST_PATIENCE_S", 0.0)
    return Dispatcher(celery)


def admit(oplog: RedisOpLog, dispatcher: Dispatcher, model_id: str, calls: int) -> None:
    """Admits and dispatches the first calls of a model."""
    oplog.create_model(model_id, dump(Model("me", "session", "base", 0.0)))
    for seq in range(calls):
        oplog.admit(model_id, seq, "forward_backward", b"", f"d{seq}")
        dispatcher.send("forward_backward", f"{model_id}:{seq}", model_id, QUEUE)


def has_message(client: redis.Redis, model_id: str) -> bool:
    return any(f'"{model_id}:0"'.encode() in message for message in client.lrange(QUEUE, 0, -1))


@pytest.mark.parametrize(("models", "calls", "longest", "most"), [(1, 5, 10, 10), (2, 3, 7, 9), (4, 1, 0, 8)])
def test_a_queue_that_nobody_reads_does_not_grow_whoever_leads(
    oplog, client, dispatcher, monkeypatch, models, calls, longest, most
):
    monkeypatch.setattr("workers.maintenance.redispatch._LONGEST_QUEUE", longest)
    for i in range(1, models + 1):
        admit(oplog, dispatcher, f"session:train:{i}", calls)
    await_waiting(oplog)
    for _ in range(5):
        leader = Redispatcher(oplog, dispatcher.send, HASTY, client)
        for _ in range(10):
            leader.sweep()
    assert client.llen(QUEUE) == most


def test_a_message_that_was_lost_is_sent_again_beside_those_of_other_models(oplog, client, dispatcher, monkeypatch):
    monkeypatch.setattr("workers.maintenance.redispatch._LONGEST_QUEUE", 0)
    oplog.admit(MODEL, 0, "forward_backward", b"", "d")
    for i in range(1, 6):
        admit(oplog, dispatcher, f"session:train:{i}", 1)
    await_waiting(oplog)
    Redispatcher(oplog, dispatcher.send, HASTY, client).sweep()
    assert has_message(client, MODEL)


def test_a_message_that_was_lost_beside_a_full_queue_is_sent_again_once_that_is_read(
    oplog, client, dispatcher, monkeypatch
):
    monkeypatch.setattr("workers.maintenance.redispatch._LONGEST_QUEUE", 10)
    oplog.admit(MODEL, 0, "forward_backward", b"", "d")
    admit(oplog, dispatcher, "session:train:1", 12)
    client.zincrby(keys.PENDING, -180_000, MODEL)  # the call has waited for three minutes
    leader = Redispatcher(oplog, dispatcher.send, PATIENT, client)
    leader.sweep()
    assert not has_message(client, MODEL)
    client.rpop(QUEUE, 3)
    leader.sweep()
    assert has_message(client, MODEL)


def test_a_full_queue_delays_no_message_of_another_queue(oplog, client, celery, dispatcher, tmp_path, monkeypatch):
    """The worker's own redispatch task reads the queues of its broker."""
    monkeypatch.setattr("workers.maintenance.redispatch._LONGEST_QUEUE", 10)
    admit(oplog, dispatcher, MODEL, 12)
    oplog.admit_sample("s:sample:0:4", "s:sample:0", "me", "sample.base", b"", "d")
    await_waiting(oplog)
    store = FolderStore(tmp_path, "secret", "http://localhost")
    made = parts(client, Settings(engine=HASTY), "node/boot", oplog, store, dispatcher.send)
    made.keeper.stop()
    create_maintenance(replace(made, celery=celery))._round("ringing")
    assert (client.llen(QUEUE), client.llen("sample.base")) == (12, 1)


def test_a_broker_that_is_away_stops_no_sweep(oplog):
    oplog.admit(MODEL, 0, "create_model", b"", "d")
    await_waiting(oplog)
    dispatched: list[tuple[str, ...]] = []
    with connect(f"redis://127.0.0.1:{free_port()}/0") as away:
        Redispatcher(oplog, lambda *send: dispatched.append(send), HASTY, away).sweep()
    assert len(dispatched) == 1
