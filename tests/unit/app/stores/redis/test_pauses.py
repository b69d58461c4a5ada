"""Pauses: the samples of a client that fell silent make way, and come back with it."""

from __future__ import annotations

import pytest
import redis

from app.domain.records import Sampler, Session, Worker
from app.domain.results import Result
from app.errors import Fenced, TooManyRequests
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import PAUSE_S, RedisLifecycle
from app.stores.redis.records import RedisRecords, dump
from app.stores.redis.types import QueueBounds

QUEUE = "sample.base"
BATCH = 24
OK = Result(b"{}")


@pytest.fixture
def samples(client: redis.Redis) -> RedisOpLog:
    records = RedisRecords(client)
    worker = Worker("sampler", "base", {}, {}, "", 0.0, queue=QUEUE, batch=BATCH, holds=1000)
    records.put(Worker.namespace, "a", dump(worker))
    for project in ("dead", "live"):
        records.put_new(Session.namespace, project, dump(Session(project, 0.0)))
        records.put_new(Sampler.namespace, f"{project}:sample:0", dump(Sampler(project, project, "base", 0.0)))
    return RedisOpLog(client, EngineSettings())


@pytest.fixture
def lifecycle(client: redis.Redis) -> RedisLifecycle:
    return RedisLifecycle(client, EngineSettings())


def admit(samples: RedisOpLog, project: str, seq: int, bounds: QueueBounds | None = None) -> str:
    sampler = f"{project}:sample:0"
    samples.admit_sample(f"{sampler}:{seq}", sampler, project, QUEUE, b"ask", "d", 10, bounds)
    return f"{sampler}:{seq}"


def fall_silent(client: redis.Redis, session: str, seconds: float = PAUSE_S + 1) -> None:
    now, micros = client.time()
    client.zadd(keys.SESSIONS_HEARD, {session: now * 1000 + micros // 1000 - int(seconds * 1000)})


def released(samples: RedisOpLog) -> list[str]:
    return [request_id for request_id, _ in samples.release_samples(QUEUE)]


def test_samples_of_a_silent_session_count_nowhere_and_nobody_begins_them(samples, lifecycle, client):
    for seq in range(5 * BATCH):
        admit(samples, "dead", seq)
    fall_silent(client, "dead")
    assert lifecycle.pause_samples() == 5 * BATCH
    assert lifecycle.pause_samples() == 0, "once"
    for key in (f"rung:{QUEUE}", f"placed:{QUEUE}", f"held:{QUEUE}/dead", f"holding:{QUEUE}"):
        assert not client.exists(keys.PREFIX + key), key
    assert client.hget(keys.PREFIX + "rung_rows", QUEUE) == b"0"
    with pytest.raises(Fenced):
        samples.claim_sample("dead:sample:0:0", "a/1")
    assert released(samples) == []
    assert all(row.throttled for row in samples.pending()), "the redispatch task dispatches none of them"


def test_the_clock_is_read_once_for_all_samplers(samples, lifecycle, client):
    for project in ("dead", "live"):
        admit(samples, project, 0)
        fall_silent(client, project, PAUSE_S - 5)
    client.config_resetstat()
    assert lifecycle.pause_samples() == 0
    assert client.info("commandstats")["cmdstat_time"]["calls"] == 1


def test_the_samples_of_others_are_not_paused(samples, lifecycle, client):
    dead, live = admit(samples, "dead", 0), admit(samples, "live", 0)
    fall_silent(client, "dead")
    fall_silent(client, "live", PAUSE_S - 5)
    assert lifecycle.pause_samples() == 1
    assert samples.claim_sample(live, "a/1") is not None
    assert [row.id for row in samples.pending()] == [live, dead], "it waits behind everybody's"


@pytest.mark.parametrize("sign", ["heartbeat", "poll", "call"])
def test_samples_come_back_at_a_sign_of_life_in_the_order_of_their_calls(samples, lifecycle, client, sign: str):
    requests = [admit(samples, "dead", seq) for seq in range(12)]
    for place, request in enumerate(requests):
        client.hset(keys.future(request), "admitted", 1000 + place)
    fall_silent(client, "dead")
    lifecycle.pause_samples()
    assert lifecycle.resume_samples() == 0, "nobody was heard"
    if sign == "heartbeat":
        lifecycle.heartbeat("dead")
    elif sign == "poll":
        lifecycle.poll(requests[3])
    else:
        admit(samples, "dead", 99)
    assert lifecycle.resume_samples() == len(requests)
    assert lifecycle.resume_samples() == 0
    assert released(samples) == requests
    entry = samples.claim_sample(requests[0], "a/1")
    assert entry is not None and entry.attempts == 0
    assert not client.keys(keys.PREFIX + "paused*")


def test_a_poll_does_not_bring_back_a_session_that_has_ended(samples, lifecycle, client):
    request = admit(samples, "dead", 0)
    lifecycle.finish("dead", "success")
    lifecycle.poll(request)
    assert client.zscore(keys.SESSIONS_HEARD, "dead") is None


def test_polls_are_noted_now_and_then(samples, lifecycle, client):
    """Each note waits for the disk."""
    request = admit(samples, "dead", 0)
    fall_silent(client, "dead", 5)
    heard = client.zscore(keys.SESSIONS_HEARD, "dead")
    lifecycle.poll(request)
    assert client.zscore(keys.SESSIONS_HEARD, "dead") == heard
    fall_silent(client, "dead", 15)
    lifecycle.poll(request)
    assert client.zscore(keys.SESSIONS_HEARD, "dead") >= heard


def test_a_running_sample_is_reported_lost_and_goes_back_without_an_attempt(samples, lifecycle, client):
    request, other = admit(samples, "dead", 0), admit(samples, "live", 0)
    for each in (request, other):
        assert samples.claim_sample(each, "a/1") is not None
    fall_silent(client, "dead")
    lifecycle.pause_samples()
    assert samples.renew([request, other], "a/1") == [request]
    assert client.exists(keys.lease(request)), "no other worker runs it until this one has stopped"
    samples.put_off_sample(request, "a/1")
    assert not client.exists(keys.lease(request))
    with pytest.raises(Fenced):
        samples.claim_sample(request, "b/1")
    lifecycle.heartbeat("dead")
    lifecycle.resume_samples()
    assert released(samples) == [request]
    entry = samples.claim_sample(request, "b/1")
    assert entry is not None and entry.attempts == 0


@pytest.mark.parametrize("begins", ["before the pause", "after the return"])
def test_a_throttled_sample_that_is_put_off_keeps_its_place_and_is_dispatched(samples, lifecycle, client, begins):
    """Its message was still in a queue when its client fell silent and came back, so a sampler runs it throttled."""
    requests = [admit(samples, "dead", seq) for seq in range(5 * BATCH)]
    if begins == "before the pause":
        assert samples.claim_sample(requests[0], "a/1")
    fall_silent(client, "dead")
    lifecycle.pause_samples()
    lifecycle.heartbeat("dead")
    lifecycle.resume_samples()
    if begins == "after the return":
        assert samples.claim_sample(requests[0], "a/1")
    samples.put_off_sample(requests[0], "a/1")
    assert all(row.throttled and row.waited_s >= 0 for row in samples.pending())
    assert not client.exists(keys.placed(QUEUE)), "it counts at no sampler"
    dispatched = list[str]()
    while due := released(samples):
        dispatched += due
        for request in due:
            samples.finish_sample(request, OK)
    assert (dispatched[0], set(dispatched)) == (requests[0], set(requests))
    assert client.hget(keys.PREFIX + "rung_rows", QUEUE) == b"0"


@pytest.mark.parametrize("how", ["session", "cancelled", "finished"])
def test_paused_samples_end_once_and_leave_nothing_behind(samples, lifecycle, client, how: str):
    request = admit(samples, "dead", 0)
    fall_silent(client, "dead")
    lifecycle.pause_samples()
    if how == "session":
        lifecycle.finish("dead", "success")
        assert lifecycle.abort_samples() == 1
    elif how == "cancelled":
        assert samples.cancel_sample(request)
    else:  # the worker that ran it had its result just then
        assert samples.finish_sample(request, OK)
    assert samples.outcome(request) is not None
    lifecycle.heartbeat("dead")
    assert lifecycle.resume_samples() == 0
    assert not client.keys(keys.PREFIX + "paused*")
    assert samples.pending() == []


def test_a_queue_that_is_full_of_paused_samples_admits_others(samples, lifecycle, client):
    full = QueueBounds(requests=6, tokens=10**6)
    for seq in range(6):
        admit(samples, "dead", seq, full)
    fall_silent(client, "dead")
    lifecycle.pause_samples()
    for seq in range(3):
        admit(samples, "live", seq, full)
    with pytest.raises(TooManyRequests):
        admit(samples, "live", 3, full)
    with pytest.raises(TooManyRequests):
        admit(samples, "dead", 6, full)


def test_thousands_are_paused_and_resumed_in_slices(samples, lifecycle, client):
    for seq in range(1000):
        admit(samples, "dead", seq)
    assert lifecycle.pause_samples() == lifecycle.resume_samples() == 0  # now the server knows the scripts
    fall_silent(client, "dead")
    client.config_resetstat()
    assert lifecycle.pause_samples() == 1000
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] > 1000 / 200, "and once for nothing"
    lifecycle.heartbeat("dead")
    client.config_resetstat()
    assert lifecycle.resume_samples() == 1000
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] > 1000 / 200
    assert client.zcard(f"{keys.PREFIX}held:{QUEUE}/dead") == 1000
