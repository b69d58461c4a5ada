"""Throttled dispatch of sampling requests: it keeps the samplers busy, and no project makes the others wait."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import redis

from app.domain.records import Sampler, Session, Worker
from app.domain.results import Result
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords, dump

QUEUE = "sample.base"
BATCH = 24
MOST = 3 * BATCH
OK = Result(b"{}")


LIGHT = tuple(f"light{i}" for i in range(30))


@pytest.fixture
def samples(client: redis.Redis) -> RedisOpLog:
    worker = Worker("sampler", "base", {}, {}, "", 0.0, queue=QUEUE, batch=BATCH, holds=1000)
    records = RedisRecords(client)
    records.put(Worker.namespace, "a", dump(worker))
    for project in ("heavy", "light", "other", *LIGHT):
        records.put_new(Session.namespace, project, dump(Session(project, 0.0)))
        records.put_new(Sampler.namespace, f"{project}:sample:0", dump(Sampler(project, project, "base", 0.0)))
    return RedisOpLog(client, EngineSettings())


def admit(samples: RedisOpLog, project: str, seq: int, sequences: int = 1) -> bool:
    """Admits a request. Returns True if it is dispatched."""
    sampler = f"{project}:sample:0"
    return not samples.admit_sample(
        f"{sampler}:{seq}", sampler, project, QUEUE, b"ask", "d", sequences=sequences
    ).throttled


def fill(samples: RedisOpLog, project: str, count: int, sequences: int = 1) -> int:
    """Admits requests. Returns the number that is dispatched."""
    return sum(admit(samples, project, seq, sequences) for seq in range(count))


def finish(samples: RedisOpLog, project: str, seq: int) -> None:
    samples.finish_sample(f"{project}:sample:0:{seq}", OK)


def released(samples: RedisOpLog, *last: str) -> list[str]:
    return [request_id for request_id, _ in samples.release_samples(QUEUE, last)]


def test_a_project_alone_has_three_batches_dispatched_and_the_next_as_each_ends(samples):
    assert fill(samples, "heavy", MOST + 50) == MOST
    assert released(samples) == []
    finish(samples, "heavy", 3)
    assert samples.release_samples(QUEUE) == [(f"heavy:sample:0:{MOST}", "a")]
    assert released(samples) == []


def test_two_groups_are_dispatched_though_one_is_more_than_all_samplers_decode(samples):
    assert fill(samples, "heavy", 3, sequences=MOST) == 1
    finish(samples, "heavy", 0)
    assert len(released(samples)) == 1


def test_a_light_project_is_dispatched_at_once_however_much_of_another_is_throttled(samples):
    fill(samples, "heavy", 10 * BATCH)
    assert fill(samples, "light", MOST) == MOST // 2, "two have half each in any case"
    assert fill(samples, "other", MOST) == MOST // 3


def test_however_many_projects_there_are_only_so_many_are_dispatched(samples):
    projects = ["heavy", *LIGHT]
    dispatched = sum(fill(samples, project, MOST) for project in projects)
    assert 2 * MOST <= dispatched <= 2 * MOST + len(projects), "twice what one has alone, and one of each in any case"


def test_what_ends_makes_room_for_those_who_had_least(samples):
    admit(samples, "other", 0)
    for project in ("heavy", "light"):
        fill(samples, project, 4 * BATCH)
    found = Counter[str]()
    for seq in range(2 * BATCH - 1):
        finish(samples, "heavy", seq)
        found.update(request.partition(":")[0] for request in released(samples, "light", "heavy"))
    assert found == {"light": BATCH - 1}, "the heavy one was served more, and comes last"


def test_several_are_released_one_of_each_project_in_turn(samples):
    fill(samples, "heavy", MOST, 1)
    dispatched = sum(admit(samples, project, seq) for seq in range(2 * BATCH) for project in ("light", "other"))
    for seq in range(MOST):
        finish(samples, "heavy", seq)
    found = Counter(request.partition(":")[0] for request in released(samples))
    assert abs(found["light"] - found["other"]) <= 1
    assert dispatched + found.total() == MOST


def test_a_projects_requests_are_dispatched_in_the_order_they_came(samples, client):
    fill(samples, "heavy", MOST)
    for seq in range(900, 903):
        assert not admit(samples, "heavy", seq)
    finish(samples, "heavy", 0)
    assert not admit(samples, "heavy", 903), "others of it wait already"
    finish(samples, "heavy", 1)
    assert released(samples) == ["heavy:sample:0:900", "heavy:sample:0:901"]


def test_what_is_throttled_is_not_dispatched_again_and_counts_nowhere_until_it_is_dispatched(samples, client):
    fill(samples, "heavy", MOST + 1)
    (held,) = [row for row in samples.pending() if row.throttled]
    assert (held.id, held.awaited, held.running) == (f"heavy:sample:0:{MOST}", False, False)
    assert client.hget(f"{keys.PREFIX}placed:{QUEUE}", "a") == str(MOST).encode()


def test_cancelled_and_aborted_ones_are_throttled_no_more_and_make_room(samples, client):
    fill(samples, "heavy", MOST + 4)
    assert samples.cancel_sample(f"heavy:sample:0:{MOST}"), "a held one"
    assert samples.cancel_sample("heavy:sample:0:0"), "one that was dispatched"
    assert released(samples) == [f"heavy:sample:0:{MOST + 1}"]
    lifecycle = RedisLifecycle(client, EngineSettings())
    lifecycle.finish("heavy", "success")
    while lifecycle.abort_samples():
        pass
    assert released(samples) == []
    for key in ("holding:" + QUEUE, "rung:" + QUEUE, f"held:{QUEUE}/heavy"):
        assert not client.exists(keys.PREFIX + key)
    assert client.hget(keys.PREFIX + "rung_rows", QUEUE) == b"0"


def test_with_no_sampler_up_enough_is_dispatched_to_begin_with(samples, client):
    client.delete(f"{keys.PREFIX}workers:a")
    assert 1 <= fill(samples, "heavy", 100) <= 64
    assert admit(samples, "light", 0)
    for seq in range(70):
        finish(samples, "heavy", seq)
        released(samples)
    assert fill(samples, "light", 2) >= 1, "it goes on"


@pytest.mark.parametrize("seed", range(2))
def test_everything_is_dispatched_in_the_end_whatever_ends_when(samples, client, seed: int):
    """Ends without a release stand for workers that died after their commit: the next worker repairs that."""
    draw = random.Random(seed)
    dispatched: set[str] = set()
    waiting: set[str] = set()
    for seq in range(15):
        for project in ("heavy", "light", "other"):
            for i in range({"heavy": 9, "light": 1, "other": 3}[project]):
                request = f"{project}:sample:0:{seq * 10 + i}"
                waiting.add(request)
                if admit(samples, project, seq * 10 + i, draw.choice([1, 2, 50])):
                    dispatched.add(request)
    while waiting:
        assert dispatched, f"{len(waiting)} wait, and nobody is dispatched to"
        for request in draw.sample(sorted(dispatched), min(len(dispatched), 20)):
            samples.finish_sample(request, OK)
            dispatched.discard(request)
            waiting.discard(request)
            if draw.random() < 0.5:
                dispatched.update(released(samples, *draw.sample(["heavy", "light", "other"], 2)))
        dispatched.update(released(samples))
    assert not client.exists(f"{keys.PREFIX}holding:{QUEUE}")


def test_what_was_put_off_keeps_nothing_else_from_being_dispatched_and_counts_again_once_it_is_begun(samples, client):
    """For example, its adapter is to come from a trainer that is down."""
    fill(samples, "heavy", MOST + 2)
    first, held = "heavy:sample:0:0", f"heavy:sample:0:{MOST}"
    assert samples.claim_sample(first, "a/1") is not None
    samples.put_off_sample(first, "a/1")
    assert released(samples) == [held]
    assert first in [row.id for row in samples.pending() if not row.throttled], "it is dispatched again"
    assert samples.claim_sample(first, "a/1") is not None
    assert client.hget(keys.PREFIX + "rung_rows", QUEUE) == str(MOST + 1).encode()
    for seq in range(MOST + 1):
        finish(samples, "heavy", seq)
    assert client.hget(keys.PREFIX + "rung_rows", QUEUE) == b"0"
