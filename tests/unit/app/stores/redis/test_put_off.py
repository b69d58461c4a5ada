"""Requeued samples: they keep nothing else from being dispatched, and still count for their project in a full queue."""

from __future__ import annotations

import pytest
import redis

from app.domain.records import Sampler, Session
from app.domain.results import Result
from app.errors import TooManyRequests
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords, dump
from app.stores.redis.types import QueueBounds

QUEUE = "sample.base"
FULL = QueueBounds(requests=4, tokens=10**6)
HOUR_MS = 3_600_000
OK = Result(b"{}")
OFF, OFF_PROJECTS = f"{keys.PREFIX}off:{QUEUE}/stuck", f"{keys.PREFIX}off_projects:{QUEUE}"


@pytest.fixture
def samples(client: redis.Redis) -> RedisOpLog:
    records = RedisRecords(client)
    for project in ("stuck", "live"):
        records.put_new(Session.namespace, project, dump(Session(project, 0.0)))
        records.put_new(Sampler.namespace, f"{project}:sample:0", dump(Sampler(project, project, "base", 0.0)))
    return RedisOpLog(client, EngineSettings())


def admit(samples: RedisOpLog, project: str, seq: int, bounds: QueueBounds = FULL) -> str:
    sampler = f"{project}:sample:0"
    samples.admit_sample(f"{sampler}:{seq}", sampler, project, QUEUE, b"ask", "d", 10, bounds)
    return f"{sampler}:{seq}"


def put_off(samples: RedisOpLog, count: int) -> list[str]:
    """Requests whose adapter cannot be had: a worker begins each and puts it off."""
    requests = [admit(samples, "stuck", seq) for seq in range(count)]
    for request in requests:
        assert samples.claim_sample(request, "a/1") is not None
        samples.put_off_sample(request, "a/1")
    return requests


def test_a_project_whose_samples_are_all_put_off_has_no_more_than_its_share_of_a_full_queue(samples):
    put_off(samples, 4)
    for seq in range(2):
        admit(samples, "live", seq)
    with pytest.raises(TooManyRequests):
        admit(samples, "stuck", 4)
    with pytest.raises(TooManyRequests):
        admit(samples, "live", 2)


@pytest.mark.parametrize("how", ["begun", "cancelled", "paused", "its session ended"])
def test_a_sample_is_requeued_until_it_is_begun_again_or_ends(samples, client, how: str):
    (request,) = put_off(samples, 1)
    assert client.zcard(OFF) == 1
    assert 0 < client.pttl(OFF) <= HOUR_MS
    lifecycle = RedisLifecycle(client, EngineSettings())
    if how == "begun":
        assert samples.claim_sample(request, "b/1") is not None
    elif how == "cancelled":
        assert samples.cancel_sample(request)
    elif how == "paused":
        client.zadd(keys.SESSIONS_HEARD, {"stuck": 1})
        assert lifecycle.pause_samples() == 1
    else:
        lifecycle.finish("stuck", "success")
        assert lifecycle.abort_samples() == 1
    assert not client.keys(keys.PREFIX + "off*")


def test_what_a_process_of_an_earlier_version_left_on_the_list_counts_for_an_hour(samples, client):
    for seq in range(4):
        admit(samples, "live", seq)
    past = client.time()[0] * 1000 - HOUR_MS - 60_000

    def leave() -> None:
        for list_, member in ((OFF, "ended"), (OFF_PROJECTS, "gone")):
            client.zadd(list_, {f"{member} {number}": past for number in range(4)})

    leave()
    put_off(samples, 1)
    assert (client.zcard(OFF), client.zcard(OFF_PROJECTS)) == (1, 1), "they go with the next requeue"
    leave()
    admit(samples, "stuck", 1)
    with pytest.raises(TooManyRequests):
        admit(samples, "stuck", 2)


def test_a_sample_that_a_process_of_an_earlier_version_put_off_is_begun_and_ends_as_any_other(samples, client):
    requests = put_off(samples, 2)
    client.delete(OFF, OFF_PROJECTS)
    for request in requests:
        assert samples.claim_sample(request, "a/1") is not None
    samples.put_off_sample(requests[0], "a/1")
    assert client.zrange(OFF, 0, -1) == [requests[0].encode()]
    for request in requests:
        samples.finish_sample(request, OK)
    assert client.hgetall(f"{keys.PREFIX}rung_rows") == {QUEUE.encode(): b"0"}
    assert not client.keys(keys.PREFIX + "off*")
