"""Completions per client: in order, and kept until they are read."""

from __future__ import annotations

import pytest
import redis

from app import ids
from app.domain.records import Sampler
from app.domain.results import Result
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.completions import RedisCompletions
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords, dump
from app.stores.redis.types import Completion

SAMPLER = "s:sample:0"
FIRST, THIRD = ids.poll_target(SAMPLER, 0), ids.poll_target(SAMPLER, 3)
SETTINGS = EngineSettings()


@pytest.fixture
def samples(client: redis.Redis) -> RedisOpLog:
    RedisRecords(client).put_new(Sampler.namespace, SAMPLER, dump(Sampler("me", "s", "base", 0.0)))
    return RedisOpLog(client, SETTINGS)


@pytest.fixture
def completions(client: redis.Redis) -> RedisCompletions:
    return RedisCompletions(client, SETTINGS)


def admit(samples: RedisOpLog, seq: int) -> str:
    return samples.admit_sample(f"{SAMPLER}:{seq}", SAMPLER, "me", "sample.base", b"ask", "d").request_id


def finish(samples: RedisOpLog, seq: int, body: bytes = b"body") -> str:
    request = admit(samples, seq)
    assert samples.finish_sample(request, Result(body))
    return request


def names(found: list[Completion]) -> list[str]:
    return [completion.request_id for completion in found]


def test_they_come_in_the_order_of_their_ends_with_state_and_size(samples, completions):
    admit(samples, 0)
    finish(samples, 2, b"four")
    samples.cancel_sample(admit(samples, 1))
    found, cursor = completions.since(FIRST, 0)
    assert [(c.request_id, c.failed) for c in found] == [(f"{SAMPLER}:2", False), (f"{SAMPLER}:1", True)]
    assert found[0].size == 4
    assert cursor > 0


def test_behind_a_cursor_only_what_is_new_comes_and_the_rest_is_forgotten(client, samples, completions):
    first = finish(samples, 0)
    found, cursor = completions.since(FIRST, 0)
    assert names(found) == [first]
    assert completions.since(FIRST, 0) == (found, cursor), "an answer that was lost comes again"
    assert completions.since(FIRST, cursor) == ([], cursor)
    second = finish(samples, 1)
    found, newer = completions.since(FIRST, cursor)
    assert (names(found), newer > cursor) == ([second], True)
    assert client.zcard(keys.completed(FIRST)) == 1


def test_each_clone_gets_its_own(samples, completions):
    mine = finish(samples, 999_999_999)
    theirs = [finish(samples, seq) for seq in (3 * 10**9, 4 * 10**9 - 1)]
    assert names(completions.since(FIRST, 0)[0]) == [mine]
    assert names(completions.since(THIRD, 0)[0]) == theirs
    last = finish(samples, 10**18 + 7)
    assert names(completions.since(ids.poll_target(SAMPLER, 10**9), 0)[0]) == [last]


def test_many_come_in_slices_without_a_loss(samples, completions):
    for seq in range(1100):
        finish(samples, seq)
    seen, cursor = [], 0
    while (answer := completions.since(FIRST, cursor))[0]:
        seen += names(answer[0])
        cursor = answer[1]
    assert seen == [f"{SAMPLER}:{seq}" for seq in range(1100)]


def test_a_cursor_of_another_history_starts_from_the_beginning(samples, completions):
    request = finish(samples, 0)
    found, cursor = completions.since(FIRST, 10**6)
    assert (names(found), cursor < 10**6) == ([request], True)


def test_the_cursor_goes_on_though_all_was_forgotten(client, samples, completions):
    finish(samples, 0)
    _, cursor = completions.since(FIRST, 0)
    client.delete(keys.completed(FIRST))
    finish(samples, 1)
    assert names(completions.since(FIRST, cursor)[0]) == [f"{SAMPLER}:1"]


def test_what_was_read_is_not_kept_for_a_client_that_never_asks(client, samples, completions):
    for seq in range(3):
        samples.future(finish(samples, seq), {"me"})
    assert client.exists(keys.completed(FIRST)) == 0
    finish(samples, 3)
    assert 0 < client.ttl(keys.completed(FIRST)) <= SETTINGS.result_unread_s


def test_an_acknowledged_result_goes_soon_and_an_unfinished_request_stays(client, samples, completions):
    done, pending = finish(samples, 0), admit(samples, 1)
    before = client.ttl(keys.future(done))
    completions.acknowledge([done, pending, "s:sample:0:77"])
    assert 200 < client.ttl(keys.future(done)) <= 300 < before
    assert client.ttl(keys.future(pending)) == -1
    assert samples.future(done, {"me"}).result == Result(b"body"), "a second fetch still finds it"
