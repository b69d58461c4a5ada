"""Snapshot of the queue: the position of each model's journal, and the samples in their order."""

from __future__ import annotations

import pytest
import redis

from app.domain.records import Model, Sampler
from app.domain.results import Result
from app.settings import EngineSettings
from app.stores.redis import backlog as module
from app.stores.redis.backlog import RedisBacklog
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords, dump
from app.stores.redis.types import ModelLine, Unfinished, WaitingSample
from tests.unit.app.stores.redis.journal_steps import MODEL, OK, admit, own

SAMPLER = "session:sample:0"


@pytest.fixture
def backlog(client: redis.Redis) -> RedisBacklog:
    RedisRecords(client).put("samplers", SAMPLER, dump(Sampler("me", "session", "base", 0.0)))
    return RedisBacklog(client, EngineSettings())


def ask(oplog: RedisOpLog, seq: int, sequences: int = 1) -> str:
    request_id = f"{SAMPLER}:{seq}"
    oplog.admit_sample(request_id, SAMPLER, "me", "sample.base", b"x", f"d{seq}", sequences=sequences)
    return request_id


def wait_since(client: redis.Redis, asked: list[str], step_ms: int = 1) -> None:
    """Sets the times since which the requests wait, `step_ms` apart."""
    client.zadd("tinsmith:pending", {request_id: 1000 + step_ms * i for i, request_id in enumerate(asked)})


def test_where_nothing_waits_there_is_nothing(backlog: RedisBacklog, oplog: RedisOpLog) -> None:
    assert backlog.unfinished(10) == Unfinished([], [], {})
    assert backlog.seqs([]) == {}
    assert backlog.running([]) == set()


def test_owners_are_the_projects_of_models_and_of_requests(backlog: RedisBacklog, oplog: RedisOpLog) -> None:
    model_id = "session:train:1"
    oplog.create_model(model_id, dump(Model("you", "session", "base", 0.0)))
    assert backlog.owners([ask(oplog, 0), model_id, f"{SAMPLER}:7", "session:train:9"]) == ["me", "you", "", ""]


def test_a_model_is_where_its_journal_is(backlog: RedisBacklog, oplog: RedisOpLog) -> None:
    def line() -> ModelLine:
        return backlog.unfinished(10).models[0]

    admit(oplog, 0)
    admit(oplog, 2)
    assert line() == ModelLine(MODEL, "me", "train.base", "", -1, 2, running=False, admitted=True)
    lease = own(oplog)
    oplog.next(lease, 0)
    assert line() == ModelLine(MODEL, "me", "train.base", "a", -1, 2, running=True, admitted=True)
    oplog.commit(lease, 0, OK)
    assert line() == ModelLine(MODEL, "me", "train.base", "a", 0, 1, running=False, admitted=False)
    assert backlog.seqs([MODEL, "no:train:1"]) == {MODEL: [2], "no:train:1": []}


def test_an_op_of_a_worker_that_is_gone_does_not_run(
    backlog: RedisBacklog, oplog: RedisOpLog, client: redis.Redis
) -> None:
    admit(oplog, 0)
    oplog.next(own(oplog), 0)
    client.delete(f"tinsmith:lease:{MODEL}")
    (line,) = backlog.unfinished(10).models
    assert (line.node, line.running) == ("", False)


def test_samples_are_listed_as_they_came_until_they_end(
    backlog: RedisBacklog, oplog: RedisOpLog, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLICE", 2)
    asked = [ask(oplog, seq) for seq in (3, 1, 2, 0)]
    wait_since(client, asked)
    assert backlog.unfinished(10).samples == [WaitingSample(request_id, "me", "sample.base") for request_id in asked]
    assert oplog.claim_sample(asked[1], "s/1")
    assert backlog.running(asked) == {asked[1]}
    oplog.finish_sample(asked[1], Result(b""))
    assert [sample.request_id for sample in backlog.unfinished(10).samples] == [asked[0], *asked[2:]]
    assert backlog.running(asked) == set()


def test_the_samples_of_a_silent_session_are_paused(
    backlog: RedisBacklog, oplog: RedisOpLog, client: redis.Redis
) -> None:
    asked = [ask(oplog, seq) for seq in range(2)]
    client.zadd("tinsmith:sessions_heard", {"session": 0})
    assert RedisLifecycle(client, EngineSettings()).pause_samples() == 2
    later = ask(oplog, 2)
    found = {sample.request_id: sample.paused for sample in backlog.unfinished(10).samples}
    assert found == {asked[0]: True, asked[1]: True, later: False}


def test_the_sequences_of_a_queue_are_those_that_were_given_to_a_sampler(
    backlog: RedisBacklog, oplog: RedisOpLog
) -> None:
    for seq in range(3):
        ask(oplog, seq, sequences=4)
    oplog.claim_sample(f"{SAMPLER}:0", "s/1")
    oplog.claim_sample(f"{SAMPLER}:1", "t/1")
    assert backlog.unfinished(10).sequences == {"sample.base": 8}


def test_all_that_waits_is_counted_by_queue_with_the_longest_wait(
    backlog: RedisBacklog, oplog: RedisOpLog, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLICE", 2)
    assert backlog.by_queue() == {}
    admit(oplog, 0)
    asked = [ask(oplog, seq) for seq in range(4)]
    oplog.claim_sample(asked[0], "s/1")
    found = backlog.by_queue()
    assert {queue: waiting.number for queue, waiting in found.items()} == {"train.base": 1, "sample.base": 4}
    assert all(0 <= waiting.oldest_s < 600 for waiting in found.values())
    since_ms = client.zscore("tinsmith:pending", asked[1])
    client.zadd("tinsmith:pending", {asked[1]: since_ms - 1_000_000, asked[2]: since_ms + 1e13})
    assert 1000 <= backlog.by_queue()["sample.base"].oldest_s < 1600, "a throttled request has not waited since 1970"
    client.delete("tinsmith:pending")
    assert backlog.by_queue() == {}


@pytest.mark.parametrize("step_ms", [0, 1])
def test_each_request_is_counted_once_while_others_end(
    backlog: RedisBacklog, oplog: RedisOpLog, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, step_ms: int
) -> None:
    monkeypatch.setattr(module, "_SLICE", 2)
    asked = [ask(oplog, seq) for seq in range(7)]
    wait_since(client, asked, step_ms)
    reading = backlog._waiting()
    next(reading)
    for request_id in asked[:2]:
        oplog.claim_sample(request_id, "s/1")
        oplog.finish_sample(request_id, Result(b""))
    assert sum(1 for _ in reading) == 6, "also those that moved to the front meanwhile"


def test_a_request_that_ended_between_two_reads_waits_no_more(
    backlog: RedisBacklog, oplog: RedisOpLog, client: redis.Redis
) -> None:
    client.hdel("tinsmith:pending_queue", ask(oplog, 0))
    ask(oplog, 1)
    assert backlog.by_queue().keys() == {"sample.base"}
    assert backlog.by_queue()["sample.base"].number == 1


def test_of_more_than_are_asked_for_the_first_are_returned(
    backlog: RedisBacklog, oplog: RedisOpLog, client: redis.Redis
) -> None:
    asked = [ask(oplog, seq) for seq in (3, 5, 1, 4, 0, 2)]
    wait_since(client, asked)
    assert [sample.request_id for sample in backlog.unfinished(4).samples] == asked[:4]


def test_models_beyond_a_slice_are_all_there(
    backlog: RedisBacklog, oplog: RedisOpLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLICE", 2)
    for i in range(5):
        oplog.create_model(f"s:train:{i}", dump(Model(f"owner {i}", "s", "base", 0.0)))
        oplog.admit(f"s:train:{i}", 0, "create_model", b"", "d")
    assert {(one.model_id, one.owner) for one in backlog.unfinished(10).models} == {
        (f"s:train:{i}", f"owner {i}") for i in range(5)
    }
