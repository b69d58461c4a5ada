"""Sampling requests: the capacity of a queue, and ends without a result of their own."""

from __future__ import annotations

import json

import pytest
import redis

from app.domain.records import Sampler, Session
from app.domain.results import Result
from app.errors import BadRequest, TooManyRequests, Unavailable
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords, dump
from app.stores.redis.types import QueueBounds
from tests.servers import MAX_MEMORY
from tests.unit.app.stores.redis.lists import calls

SESSION = "session"
SAMPLER, OTHER = f"{SESSION}:sample:0", "session2:sample:0"
QUEUE = "sample.base"
OK = Result(b"{}")
SETTINGS = EngineSettings()


@pytest.fixture
def samples(client: redis.Redis) -> RedisOpLog:
    records = RedisRecords(client)
    for sampler in (SAMPLER, OTHER):
        session = sampler.partition(":")[0]
        records.put_new(Session.namespace, session, dump(Session("me", 0.0)))
        records.put_new(Sampler.namespace, sampler, dump(Sampler("me", session, "base", 0.0)))
    return RedisOpLog(client, SETTINGS)


@pytest.fixture
def lifecycle(client: redis.Redis) -> RedisLifecycle:
    return RedisLifecycle(client, SETTINGS)


def admit(
    oplog: RedisOpLog, seq: int, tokens: int = 1, bounds: QueueBounds | None = None, sampler: str = SAMPLER
) -> str:
    request = f"{sampler}:{seq}"
    oplog.admit_sample(request, sampler, "me", QUEUE, b"ask", "d", tokens, bounds)
    return request


def error(oplog: RedisOpLog, request: str) -> dict[str, str]:
    result = oplog.outcome(request)
    assert result is not None and result.failed
    return json.loads(result.body)


def published(client: redis.Redis, do: object) -> list[str]:
    """Messages about aborted requests that are published while `do` runs."""
    with client.pubsub() as channel:
        channel.subscribe(keys.ABORTED_CHANNEL)
        assert channel.get_message(timeout=60)["type"] == "subscribe"
        do()
        client.publish(keys.ABORTED_CHANNEL, "end")
        found = []
        while (message := channel.get_message(timeout=60)["data"].decode()) != "end":
            found.append(message)
        return found


def test_a_full_queue_puts_further_requests_off_and_says_which_bound_it_was(samples):
    few = QueueBounds(requests=2, tokens=100)
    admit(samples, 0, 10, few)
    admit(samples, 1, 10, few)
    with pytest.raises(TooManyRequests, match=r"2 requests .*sampler.queue_requests allows 2"):
        admit(samples, 2, 10, few)
    with pytest.raises(TooManyRequests, match=r"20 tokens .*the 81 of this one .*sampler.queue_tokens \(100\)"):
        admit(samples, 2, 81, QueueBounds(requests=9, tokens=100))
    assert samples.outcome(f"{SAMPLER}:2") is None
    assert len(samples.pending()) == 2, "nothing of it is kept"
    assert TooManyRequests.retry_after_s is not None


def test_what_is_finished_makes_room_and_exactly_as_much_as_it_took(samples):
    bounds = QueueBounds(requests=9, tokens=100)
    admit(samples, 0, 60, bounds)
    admit(samples, 1, 40, bounds)
    samples.finish_sample(f"{SAMPLER}:0", OK)
    samples.finish_sample(f"{SAMPLER}:0", OK)
    with pytest.raises(TooManyRequests):
        admit(samples, 2, 61, bounds)
    admit(samples, 2, 60, bounds)


def test_a_repeat_of_what_was_admitted_is_never_put_off(samples):
    admit(samples, 0, 50)
    assert admit(samples, 0, 50, QueueBounds(requests=1, tokens=50)) == f"{SAMPLER}:0"
    assert admit(samples, 0, 50, QueueBounds(requests=1, tokens=10)) == f"{SAMPLER}:0"


def of_other(samples: RedisOpLog, seq: int, tokens: int, bounds: QueueBounds) -> None:
    samples.admit_sample(f"{SAMPLER}:{seq}", SAMPLER, "other", QUEUE, b"ask", "d", tokens, bounds)


def test_a_full_queue_admits_a_project_up_to_its_share_of_the_requests(samples):
    bounds = QueueBounds(requests=4, tokens=100)
    for seq in range(4):
        admit(samples, seq, 1, bounds)
    of_other(samples, 4, 1, bounds)
    of_other(samples, 5, 1, bounds)
    with pytest.raises(TooManyRequests, match="6 requests"):
        of_other(samples, 6, 1, bounds)
    with pytest.raises(TooManyRequests, match="6 requests"):
        admit(samples, 7, 1, bounds)


def test_a_queue_full_of_tokens_admits_one_request_of_a_project_that_has_none(samples):
    bounds = QueueBounds(requests=9, tokens=100)
    admit(samples, 0, 100, bounds)
    of_other(samples, 1, 100, bounds)
    with pytest.raises(TooManyRequests, match="200 tokens"):
        of_other(samples, 2, 1, bounds)


def test_a_request_that_could_never_fit_is_a_400_at_once(samples):
    with pytest.raises(BadRequest, match=r"101 tokens .*sampler.queue_tokens \(100\)"):
        admit(samples, 0, 101, QueueBounds(requests=9, tokens=100))
    assert samples.pending() == []


def test_each_queue_has_bounds_of_its_own(samples):
    admit(samples, 0, 100, QueueBounds(1, 100))
    samples.admit_sample(f"{SAMPLER}:1", SAMPLER, "me", "sample.other", b"ask", "d", 100, QueueBounds(1, 100))


def test_a_cancelled_request_fails_as_the_users_doing_and_never_runs(client, samples):
    request = admit(samples, 0)
    assert published(client, lambda: samples.cancel_sample(request)) == [request]
    assert error(samples, request)["category"] == "user"
    assert "cancelled" in error(samples, request)["error"]
    assert samples.claim_sample(request, "a/1") is None
    assert samples.pending() == []
    assert client.keys("*payload:*") == [] == client.keys("*op:*")


def test_of_cancelling_and_finishing_the_first_one_stays(client, samples):
    done, cancelled = admit(samples, 0), admit(samples, 1)
    samples.claim_sample(cancelled, "a/1")
    samples.finish_sample(done, OK)
    assert not samples.cancel_sample(done)
    assert published(client, lambda: samples.cancel_sample(done)) == []
    assert samples.outcome(done) == OK
    assert samples.cancel_sample(cancelled)
    assert not samples.finish_sample(cancelled, OK)
    assert error(samples, cancelled)["category"] == "user"


def test_a_cancelled_requests_worker_holds_its_lease_no_more(samples):
    request = admit(samples, 0)
    samples.claim_sample(request, "a/1")
    assert samples.renew([request], "a/1") == []
    samples.cancel_sample(request)
    assert samples.renew([request], "a/1") == [request]


def test_the_end_of_a_session_cancels_what_it_samples_and_nothing_else(client, samples, lifecycle):
    mine = [admit(samples, seq) for seq in range(600)]
    done = mine.pop()
    samples.finish_sample(done, OK)
    other = admit(samples, 0, sampler=OTHER)
    assert lifecycle.abort_samples() == 0
    lifecycle.finish(SESSION, "success")
    assert sorted(published(client, lifecycle.abort_samples)) == sorted(mine)
    assert error(samples, mine[0]) == {"error": "cancelled: its session has ended", "category": "user"}
    assert samples.outcome(done) == OK
    assert [waiting.id for waiting in samples.pending()] == [other]
    assert lifecycle.abort_samples() == 0


def test_the_end_of_a_session_looks_at_no_sampler_of_another(client, samples, lifecycle):
    admit(samples, 0)
    lifecycle.abort_samples(SESSION)

    def cost() -> int:
        before = calls(client)
        assert lifecycle.abort_samples(SESSION) == 0
        return calls(client) - before

    alone = cost()
    for number in range(50):
        sampler = f"session2:sample:{number}"
        RedisRecords(client).put_new(Sampler.namespace, sampler, dump(Sampler("me", "session2", "base", 0.0)))
        admit(samples, 0, sampler=sampler)
    assert cost() == alone
    for session in (SESSION, "session2"):
        lifecycle.finish(session, "success")
    assert lifecycle.abort_samples(SESSION) == 1
    assert lifecycle.abort_samples() == 50


def test_many_samplers_are_looked_at_in_slices(client, samples, lifecycle, monkeypatch):
    monkeypatch.setattr("app.stores.redis.lifecycle._SAMPLERS_AT_ONCE", 1)
    monkeypatch.setattr("app.stores.redis.lifecycle._ABORTED_AT_ONCE", 2)
    mine = [admit(samples, seq, sampler=sampler) for sampler in (SAMPLER, OTHER) for seq in range(5)]
    for session in (SESSION, "session2"):
        lifecycle.finish(session, "success")
    assert sorted(published(client, lifecycle.abort_samples)) == sorted(mine)


def test_a_sample_that_ended_without_a_result_is_reported_once(samples, lifecycle):
    waiting, running, done, ending = (admit(samples, seq) for seq in range(4))
    for request in (running, done):
        samples.claim_sample(request, "a/1")
    samples.finish_sample(done, OK)
    for request in (waiting, running, done):
        for _ in range(2):
            samples.cancel_sample(request)
    samples.put_off_sample(running, "a/1")
    lifecycle.finish(SESSION, "success")
    lifecycle.abort_samples()
    assert lifecycle.take_revoked() == [waiting, running, ending]
    assert lifecycle.take_revoked() == []


def test_a_storm_of_cancelled_samples_takes_a_bounded_list(client, samples, lifecycle):
    client.rpush(keys.REVOKED, *range(10_000))
    request = admit(samples, 0)
    samples.cancel_sample(request)
    assert (client.llen(keys.REVOKED), client.lindex(keys.REVOKED, -1)) == (10_000, request.encode())
    assert len(lifecycle.take_revoked()) == 1000


def test_a_session_that_a_new_sample_brought_back_keeps_what_waits(samples, lifecycle):
    admit(samples, 0)
    lifecycle.finish(SESSION, "success")
    admit(samples, 1)
    assert lifecycle.abort_samples() == 0
    assert len(samples.pending()) == 2


def test_the_end_of_a_sampler_cancels_its_requests(client, samples, lifecycle):
    request, other = admit(samples, 0), admit(samples, 0, sampler=OTHER)
    RedisRecords(client).delete(Sampler.namespace, SAMPLER)
    assert lifecycle.abort_samples() == 1
    assert error(samples, request)["category"] == "user"
    assert samples.outcome(other) is None


def test_a_request_that_comes_again_while_its_expired_result_is_read_does_not_expire(client, samples, monkeypatch):
    request = admit(samples, 1)
    samples.claim_sample(request, "a/1")
    samples.finish_sample(request, OK)
    result = samples._result

    def expires_and_comes_again(*call):
        found = result(*call)
        client.delete(keys.future(request))
        admit(samples, 1)
        return found

    monkeypatch.setattr(samples, "_result", expires_and_comes_again)
    samples.future(request, {"me"})
    assert client.hget(keys.future(request), "state") == b"pending"
    assert client.ttl(keys.future(request)) == -1


def test_a_full_server_says_why_and_still_lets_go_of_requests(client, samples, lifecycle):
    assert samples.shortage() == ""
    first, second = admit(samples, 0), admit(samples, 1)
    client.config_set("maxmemory", 1)
    try:
        assert "engine.memory_share" in samples.shortage()
        with pytest.raises(Unavailable):
            admit(samples, 2)
        assert samples.cancel_sample(first)
        lifecycle.finish(SESSION, "success")
        assert lifecycle.abort_samples() == 1
    finally:
        client.config_set("maxmemory", MAX_MEMORY)
    assert samples.outcome(second) is not None


def test_every_client_that_joins_has_a_number_of_its_own(client, samples):
    records = RedisRecords(client)
    assert [records.join(sampler) for sampler in (SAMPLER, SAMPLER, OTHER, SAMPLER)] == [1, 2, 1, 3]
