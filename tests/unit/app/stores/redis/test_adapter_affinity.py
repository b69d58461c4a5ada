"""Adapter affinity of sampling requests: to the adapter's sampler while it has room, else to another live one."""

from __future__ import annotations

import time

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
BATCH, HOLDS = 4, 10
# Of two equally empty samplers, requests of `BASE` go to "a": the names alone decide.
BASE, TUNED, SAME, OTHER = (f"session:sample:{number}" for number in range(1, 5))


@pytest.fixture
def records(client: redis.Redis) -> RedisRecords:
    """Two samplers of the base model, and workers that read other queues; `SAME` names the adapter of `TUNED` too."""
    records = RedisRecords(client)
    records.put_new(Session.namespace, "session", dump(Session("me", 0.0)))
    for sampler, prefix in ((BASE, ""), (TUNED, "models/m/a"), (SAME, "models/m/a"), (OTHER, "models/m/b")):
        records.put_new(Sampler.namespace, sampler, dump(Sampler("me", "session", "base", 0.0, prefix=prefix)))
    start(records, "a", "b")
    start(records, "0-other", queue="sample.other")
    records.put(Worker.namespace, "0-trainer", dump(Worker("trainer", "base", {}, {}, "", 0.0, queue="train.base")))
    return records


@pytest.fixture
def samples(client: redis.Redis, records: RedisRecords) -> RedisOpLog:
    return RedisOpLog(client, EngineSettings())


def start(
    records: RedisRecords, *nodes: str, queue: str = QUEUE, healthy: bool = True, batch: int = BATCH, holds: int = HOLDS
) -> None:
    for node in nodes:
        worker = Worker("sampler", "base", {}, {}, "", 0.0, healthy, queue, batch, holds)
        records.put(Worker.namespace, node, dump(worker))


def admit(samples: RedisOpLog, seq: int, sampler: str = BASE, sequences: int = 1) -> str | None:
    """Admits a request; returns the node it is dispatched to."""
    request = f"{sampler}:{seq}"
    return samples.admit_sample(request, sampler, "me", QUEUE, b"ask", "d", sequences=sequences).node


def placed(client: redis.Redis) -> dict[str, int]:
    return {node.decode(): int(rows) for node, rows in client.hgetall(f"{keys.PREFIX}placed:{QUEUE}").items()}


def test_requests_of_a_session_go_to_one_sampler_and_those_of_others_to_the_emptier_one(samples):
    assert [admit(samples, seq) for seq in range(3)] == ["a"] * 3
    assert [admit(samples, seq, TUNED) for seq in range(2)] == ["b"] * 2


def test_under_little_load_adapters_are_spread_evenly_and_a_forgotten_affinity_is_the_same_again(
    client, records, samples
):
    sessions = [f"session:sample:{number}" for number in range(100, 116)]
    for sampler in sessions:
        records.put_new(Sampler.namespace, sampler, dump(Sampler("me", "session", "base", 0.0)))

    def affinities(seq: int) -> list[str | None]:
        """Affinities of sixteen sessions, each alone while it samples."""
        found = []
        for sampler in sessions:
            found.append(admit(samples, seq, sampler))
            samples.finish_sample(f"{sampler}:{seq}", Result(b""))
            client.delete(f"{keys.PREFIX}home:{sampler}")
        return found

    first = affinities(0)
    assert min(first.count("a"), first.count("b")) >= 4
    assert affinities(1) == first


def test_sampling_sessions_of_one_adapter_go_to_one_sampler(samples):
    admit(samples, 0)
    assert [admit(samples, 0, TUNED), admit(samples, 0, SAME), admit(samples, 1, TUNED)] == ["b"] * 3


def test_a_full_sampler_passes_requests_on_and_gets_them_again_once_it_has_room(samples):
    assert [admit(samples, seq) for seq in range(BATCH + 1)] == [*"aaaa", "b"]
    samples.finish_sample(f"{BASE}:0", Result(b""))
    assert [admit(samples, seq) for seq in range(5, 7)] == ["a", "b"]


def test_a_request_fills_as_many_places_as_it_has_samples(samples):
    assert admit(samples, 0, sequences=BATCH - 1) == "a"
    assert [admit(samples, seq, sequences=2) for seq in (1, 2)] == ["a", "b"], "one place is enough to begin in"


def test_few_requests_for_many_samples_fill_no_sampler_whose_batch_has_room(records, samples):
    start(records, "a", "b", batch=16, holds=4)
    assert [admit(samples, seq, sequences=8) for seq in (0, 1)] == ["a", "a"]
    assert admit(samples, 0, TUNED, sequences=8) == "b"
    assert admit(samples, 0, OTHER, sequences=8) == "b", "b has room for 8 of its 16"
    assert admit(samples, 1, OTHER) is None


def test_while_no_sampler_has_room_requests_keep_their_affinity_until_it_is_a_batch_behind(client, samples):
    admit(samples, 0, sequences=BATCH)
    admit(samples, 0, TUNED, sequences=BATCH)
    assert [admit(samples, seq) for seq in range(1, BATCH + 3)] == [*"aaaa", "b", "a"]
    assert placed(client) == {"a": 2 * BATCH + 1, "b": BATCH + 1}


def test_a_request_sent_to_no_sampler_counts_at_the_first_that_claims_it(client, samples):
    for sampler in (BASE, TUNED):
        admit(samples, 0, sampler, sequences=HOLDS)
    assert admit(samples, 1, OTHER) is None
    assert placed(client) == {"a": HOLDS, "b": HOLDS}
    samples.claim_sample(f"{OTHER}:1", "b/1")
    assert placed(client) == {"a": HOLDS, "b": HOLDS + 1}
    for sampler in (BASE, TUNED):
        samples.finish_sample(f"{sampler}:0", Result(b""))
    assert admit(samples, 2, OTHER) == "b", "the sampler that claimed it is its affinity"


def test_nothing_goes_to_a_sampler_that_is_gone_or_not_well(samples, records):
    assert admit(samples, 0) == "a"
    records.delete(Worker.namespace, "a")
    assert admit(samples, 1) == "b"
    start(records, "a")
    assert admit(samples, 2) == "b", "the affinity has moved"
    start(records, "b", healthy=False)
    assert admit(samples, 3) == "a"
    records.delete(Worker.namespace, "a")
    assert admit(samples, 4) is None


def test_a_sampler_that_does_not_take_its_requests_loses_its_affinity(client, samples):
    """The sampler died a moment ago: its record has not expired yet."""
    assert [admit(samples, seq) for seq in range(2)] == ["a", "a"]
    samples.claim_sample(f"{BASE}:0", "b/1")
    assert placed(client) == {"a": 1, "b": 1}
    assert admit(samples, 2) == "b"


def test_what_another_sampler_takes_for_want_of_room_leaves_the_affinity_as_it_is(samples):
    for seq in range(BATCH + 1):
        admit(samples, seq)
    samples.claim_sample(f"{BASE}:{BATCH}", "b/1")
    samples.finish_sample(f"{BASE}:0", Result(b""))
    assert admit(samples, 9) == "a"


def test_a_request_sent_to_no_sampler_leaves_the_affinity_of_its_adapter_as_it_is(samples):
    for sampler in (BASE, TUNED):
        admit(samples, 0, sampler, sequences=HOLDS)
    assert admit(samples, 1) is None
    samples.claim_sample(f"{BASE}:1", "b/1")
    for sampler in (BASE, TUNED):
        samples.finish_sample(f"{sampler}:0", Result(b""))
    assert admit(samples, 2) == "a"


@pytest.mark.parametrize("end", ["finish", "cancel", "put off"])
def test_what_ends_or_is_put_off_counts_nowhere(client, samples, end):
    admit(samples, 0, sequences=3)
    samples.claim_sample(f"{BASE}:0", "a/1")
    if end == "finish":
        samples.finish_sample(f"{BASE}:0", Result(b""))
    elif end == "cancel":
        samples.cancel_sample(f"{BASE}:0")
    else:
        samples.put_off_sample(f"{BASE}:0", "a/1")
        assert not samples.pending()[0].awaited
    assert placed(client) == {}


def test_a_request_is_awaited_until_one_begins_on_it_and_again_when_that_one_is_lost(client, samples):
    admit(samples, 0)
    assert [row.awaited for row in samples.pending()] == [True]
    samples.claim_sample(f"{BASE}:0", "a/1")
    assert [row.awaited for row in samples.pending()] == [False]
    client.delete(keys.lease(f"{BASE}:0"))
    assert [row.awaited for row in samples.pending()] == [True]


def test_an_affinity_is_forgotten_some_time_after_its_last_request(client, samples):
    admit(samples, 0)
    [affinity] = client.keys(f"{keys.PREFIX}home:*")
    client.pexpire(affinity, 1000)
    admit(samples, 1)
    assert client.pttl(affinity) > 1000


@pytest.mark.parametrize(("path", "left"), [("", 0), ("tinker://m/sampler_weights/a", 1)])
def test_affinity_ends_with_its_sampler_except_that_of_a_checkpoint_others_may_use(
    client, records, samples, path, left
):
    record = Sampler("me", "session", "base", 0.0, path, "models/m/a")
    records.put(Sampler.namespace, TUNED, dump(record))
    for sampler in (BASE, TUNED):
        admit(samples, 1, sampler)
    assert client.exists(f"{keys.PREFIX}home:{BASE}", f"{keys.PREFIX}home:models/m/a") == 2
    lifecycle = RedisLifecycle(client, EngineSettings(retain_s=0.001))
    lifecycle.finish("session", "success")
    time.sleep(0.01)
    assert all(lifecycle.end_sampler(sampler) for sampler in (BASE, TUNED))
    assert not client.exists(f"{keys.PREFIX}home:{BASE}")
    assert client.exists(f"{keys.PREFIX}home:models/m/a") == left
