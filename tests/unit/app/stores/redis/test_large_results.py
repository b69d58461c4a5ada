"""Large results leave the state server's memory, count for their project, and are read as they were."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import redis

from app.domain.records import Model, Sampler
from app.domain.results import Result
from app.errors import Gone, Unavailable
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.completions import RedisCompletions
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.payloads import PIECE_BYTES, RedisPayloads
from app.stores.redis.records import RedisRecords, dump
from tests.unit.app.stores.redis.journal_steps import MODEL, admit, own
from tests.unit.away_store import AwayStore
from workers.maintenance.spilling import PayloadSpilling

KB = 1024
SETTINGS = EngineSettings(lease_s=60, result_spill_bytes=4 * KB, result_budget_bytes=20 * KB)
BRIEF = SETTINGS.model_copy(update={"result_unread_s": 1, "result_budget_bytes": 200 * KB})
SAMPLER, OTHERS = "session:sample:0", "other:train:0"
LARGE = Result(bytes(range(256)) * 32, "application/x-protobuf")
IN_A_KEY = Result(bytes(PIECE_BYTES), "application/x-protobuf")
"""A result that does not lie in its future."""


@pytest.fixture
def store(tmp_path: Path) -> AwayStore:
    return AwayStore(tmp_path, "", "")


@pytest.fixture
def oplog(client: redis.Redis, store: AwayStore) -> RedisOpLog:
    log = RedisOpLog(client, SETTINGS, store)
    assert log.create_model(MODEL, dump(Model("me", "session", "base", 0.0)))
    assert log.create_model(OTHERS, dump(Model("you", "session", "base", 0.0)))
    RedisRecords(client).put_new(Sampler.namespace, SAMPLER, dump(Sampler("me", "s", "base", 0.0)))
    return log


@pytest.fixture
def spilling(client: redis.Redis, store: AwayStore) -> PayloadSpilling:
    return PayloadSpilling(RedisPayloads(client, SETTINGS, store))


def committed(oplog: RedisOpLog, results: int = 1) -> list[str]:
    """The request ids of Ops with a large result each."""
    lease = own(oplog)
    requests = []
    for seq in range(lease.applied + 1, lease.applied + 1 + results):
        requests.append(admit(oplog, seq))
        oplog.commit(lease, seq, LARGE)
    return requests


def counted(client: redis.Redis) -> dict[bytes, bytes]:
    return client.hgetall("tinsmith:result_bytes")


def sampled(oplog: RedisOpLog, seq: int = 1, result: Result = LARGE) -> str:
    request = f"{SAMPLER}:{seq}"
    oplog.admit_sample(request, SAMPLER, "me", "sample.base", b"prompt", f"digest {seq}")
    assert oplog.finish_sample(request, result)
    return request


def test_a_large_result_is_moved_and_read_as_it_was(
    client: redis.Redis, oplog: RedisOpLog, spilling: PayloadSpilling, store: AwayStore
):
    requests = [*committed(oplog), sampled(oplog)]
    before = [oplog.future(request, {"me"}) for request in requests]
    spilling.sweep()
    assert [client.hget(keys.future(request), "body") for request in requests] == [None, None]
    assert [oplog.future(request, {"me"}) for request in requests] == before
    assert len(store.list("results/")) == 2


def test_a_worker_asks_for_an_outcome_without_the_object_store(
    oplog: RedisOpLog, spilling: PayloadSpilling, store: AwayStore
):
    requests = [*committed(oplog), sampled(oplog)]
    spilling.sweep()
    store.away = True
    assert [outcome.failed for request in requests if (outcome := oplog.outcome(request))] == [False, False]


def test_a_small_result_stays(client: redis.Redis, oplog: RedisOpLog, spilling: PayloadSpilling, store: AwayStore):
    request = admit(oplog, 0)
    oplog.commit(own(oplog), 0, Result(b"x" * (4 * KB - 1)))
    spilling.sweep()
    assert client.hexists(keys.future(request), "body")
    assert (store.list("results/"), counted(client)) == ([], {})


def test_polls_of_many_requests_hear_the_same_size(client: redis.Redis, oplog: RedisOpLog, spilling: PayloadSpilling):
    sampled(oplog)
    completions = RedisCompletions(client, SETTINGS)
    before = completions.since(f"{SAMPLER}/0", 0)
    spilling.sweep()
    assert completions.since(f"{SAMPLER}/0", 0) == before
    assert before[0][0].size == len(LARGE.body)


def test_a_project_over_its_budget_waits_and_others_do_not(client: redis.Redis, oplog: RedisOpLog):
    committed(oplog, 3)
    assert counted(client) == {b"me": b"%d" % (3 * len(LARGE.body))}
    for refused in (lambda: admit(oplog, 4), lambda: sampled(oplog)):
        with pytest.raises(Unavailable, match=r"this project take 24576 bytes, over engine\.result_budget_bytes"):
            refused()
    assert admit(oplog, 2), "a repeat"
    assert oplog.admit(OTHERS, 0, "forward_backward", b"payload", "digest").fresh


def test_a_result_that_has_expired_counts_no_longer_and_its_object_goes(
    client: redis.Redis, oplog: RedisOpLog, spilling: PayloadSpilling, store: AwayStore
):
    moved, *rest = committed(oplog, 3)
    spilling._payloads.spill_result(moved)
    client.delete(*(keys.future(request) for request in (moved, *rest)))
    spilling.sweep()
    assert (counted(client), store.list("results/")) == ({}, [])
    assert client.smembers("tinsmith:results_due") == set()
    assert admit(oplog, 4)


def test_of_many_results_the_expired_ones_count_no_longer_at_once(
    client: redis.Redis, oplog: RedisOpLog, spilling: PayloadSpilling
):
    committed(oplog, 2)
    expired = [sampled(RedisOpLog(client, BRIEF), seq) for seq in range(1, 9)]
    for row in range(600):  # of an earlier version: they have no expiry listed, and hide the others from a slow scan
        client.hset("tinsmith:results", f"other:{row}", json.dumps({"size": 1, "owner": "you", "key": "moved"}))
        client.set(f"tinsmith:future:other:{row}", "")
    while client.exists(*(keys.future(request) for request in expired)):
        time.sleep(0.02)
    spilling.sweep()
    assert counted(client) == {b"me": b"%d" % (2 * len(LARGE.body))}


def test_the_time_to_forget_a_result_falls_in_the_step_that_lets_it_expire_sooner(
    client: redis.Redis, oplog: RedisOpLog
):
    requests = [*committed(oplog), sampled(oplog)]
    written = [client.pexpiretime(keys.future(request)) for request in requests]
    assert client.zmscore("tinsmith:results_expire", requests) == written
    assert all(oplog.future(request, {"me"}).result == LARGE for request in requests)
    read = [client.pexpiretime(keys.future(request)) for request in requests]
    assert client.zmscore("tinsmith:results_expire", requests) == read
    assert max(read) < min(written)


def test_an_acknowledged_result_is_forgotten_when_it_expires(client: redis.Redis, oplog: RedisOpLog):
    request = sampled(oplog, result=IN_A_KEY)
    written = client.pexpiretime(keys.future(request))
    RedisCompletions(client, SETTINGS).acknowledge([request])
    expires = client.pexpiretime(keys.future(request))
    assert expires < written
    assert client.zscore("tinsmith:results_expire", request) == expires
    assert client.pexpiretime(keys.result(request)) == expires


def test_a_result_that_expires_while_it_moves_counts_no_longer_and_its_object_goes(
    client: redis.Redis, oplog: RedisOpLog, spilling: PayloadSpilling, store: AwayStore
):
    request = sampled(oplog, result=IN_A_KEY)
    client.delete(keys.future(request))
    assert not spilling._payloads.spill_result(request)
    assert not client.exists(keys.future(request)), "a future without an expiry would count for ever"
    spilling.sweep()
    assert (counted(client), store.list("results/")) == ({}, [])


def test_a_result_of_an_earlier_version_is_forgotten_in_its_turn(
    client: redis.Redis, oplog: RedisOpLog, spilling: PayloadSpilling
):
    [request] = committed(oplog)
    client.delete("tinsmith:results_expire", keys.future(request))
    spilling.sweep()
    assert counted(client) == {}


@pytest.mark.parametrize("moves", [False, True], ids=["in Redis", "moved"])
def test_a_request_that_is_admitted_again_after_its_result_expired_counts_once(
    client: redis.Redis, oplog: RedisOpLog, spilling: PayloadSpilling, store: AwayStore, *, moves: bool
):
    for _ in range(2):
        request = sampled(oplog)
        assert counted(client) == {b"me": b"%d" % len(LARGE.body)}
        if moves:
            spilling._payloads.spill_result(request)
        client.delete(keys.future(request))
    spilling.sweep()
    assert (counted(client), store.list("results/")) == ({}, [])
    assert not client.exists("tinsmith:results", "tinsmith:results_expire", "tinsmith:results_due")


def test_a_result_that_is_there_counts_whatever_its_listed_expiry(
    client: redis.Redis, oplog: RedisOpLog, spilling: PayloadSpilling
):
    [request] = committed(oplog)
    client.zadd("tinsmith:results_expire", {request: 1})
    spilling.sweep()
    assert counted(client) == {b"me": b"%d" % len(LARGE.body)}
    assert client.zscore("tinsmith:results_expire", request) == client.pexpiretime(keys.future(request))


def test_a_small_result_in_the_place_of_an_expired_large_one_ends_its_count(client: redis.Redis, oplog: RedisOpLog):
    request = sampled(oplog)
    client.delete(keys.future(request))
    oplog.admit_sample(request, SAMPLER, "me", "sample.base", b"prompt", "digest 1")
    assert oplog.finish_sample(request, Result(b"small"))
    assert counted(client) == {}


def test_a_request_that_waits_again_when_its_first_result_is_due_keeps_its_place(
    client: redis.Redis, oplog: RedisOpLog, spilling: PayloadSpilling
):
    request = sampled(oplog)
    client.delete(keys.future(request))
    client.zadd("tinsmith:results_expire", {request: 1})
    oplog.admit_sample(request, SAMPLER, "me", "sample.base", b"prompt", "digest 1")
    spilling.sweep()
    assert oplog.finish_sample(request, LARGE)
    assert counted(client) == {b"me": b"%d" % len(LARGE.body)}
    assert oplog.future(request, {"me"}).result == LARGE


def test_while_the_store_is_away_a_result_stays_and_a_moved_one_is_a_503(
    oplog: RedisOpLog, spilling: PayloadSpilling, store: AwayStore
):
    moved, stays = committed(oplog, 2)
    assert spilling._payloads.spill_result(moved)
    store.away = True
    with pytest.raises(Unavailable):
        spilling.sweep()
    assert oplog.future(stays, {"me"}).result == LARGE
    with pytest.raises(Unavailable):
        oplog.future(moved, {"me"})
    store.away = False
    spilling.sweep()
    assert oplog.future(moved, {"me"}).result == oplog.future(stays, {"me"}).result == LARGE


def test_of_two_movers_one_wins_and_the_other_object_goes(
    client: redis.Redis, oplog: RedisOpLog, spilling: PayloadSpilling, store: AwayStore
):
    [request] = committed(oplog)
    payloads = spilling._payloads
    first, second = (f"results/{request}/{name}" for name in ("a", "b"))
    for key in (first, second):
        payloads._run("begin_spill", key)
        store.put_new(key, LARGE.body)
    assert [payloads._run("spill_result", request, key) for key in (first, second)] == [1, 0]
    spilling.sweep()
    assert store.list("results/") == [first]
    assert oplog.future(request, {"me"}).result == LARGE


def test_a_result_that_the_store_lacks_may_be_back_later_and_is_no_410(
    client: redis.Redis, oplog: RedisOpLog, spilling: PayloadSpilling, store: AwayStore, tmp_path: Path
):
    [request] = committed(oplog)
    spilling.sweep()
    not_shared = RedisOpLog(client, SETTINGS, AwayStore(tmp_path / "another", "", ""))
    with pytest.raises(Unavailable, match="check that its folder is mounted here"):
        not_shared.future(request, {"me"})
    assert oplog.future(request, {"me"}).result == LARGE
    client.delete(keys.future(request))
    with pytest.raises(Gone, match="expired"):
        not_shared.future(request, {"me"})


def test_a_result_whose_bytes_expire_before_its_future_is_a_503(client: redis.Redis, oplog: RedisOpLog):
    request = sampled(oplog, result=IN_A_KEY)
    assert oplog.future(request, {"me"}).result == IN_A_KEY
    client.delete(keys.result(request))
    with pytest.raises(Unavailable, match="about to expire"):
        oplog.future(request, {"me"})
