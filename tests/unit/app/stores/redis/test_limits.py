"""Limits on counts and sums: sequences, models and bytes, on a real server. Nothing counts twice."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from app.domain.limits import KEY, PROJECT, Charge, Limits, Payer
from app.domain.records import Checkpoint, Model, Session
from app.domain.results import Result
from app.errors import LimitReached, TooManyRequests
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.limits import RedisQuotas
from app.stores.redis.pages import RedisPages
from app.stores.redis.records import dump
from app.stores.redis.types import Lease
from tests.pages import device_ms, used, used_by_runs
from tests.unit.app.stores.redis.charges import MODEL, SAMPLER, SESSION, SETTINGS, ask, mine, oplog, quotas, stored

__all__ = ["oplog", "quotas", "stored"]  # the fixtures


def sample(oplog: RedisOpLog, seq: int, samples: int, payers: tuple[Payer, ...]) -> str:
    request = f"{SAMPLER}:{seq}"
    charge = Charge(payers, 1, samples)
    oplog.admit_sample(request, SAMPLER, "me", "sample.base", b"ask", "d", 1, None, samples, charge)
    return request


def tokens_per_s(quotas: RedisQuotas, payers: tuple[Payer, ...]) -> list[float]:
    return [quotas.used(payer).tokens_per_s for payer in payers]


def test_sequences_count_until_their_request_ends_however_it_ends(client, oplog, stored, quotas):
    payers = mine(Limits(concurrent_samples=4))
    done, cancelled, aborted = (sample(oplog, seq, 1, payers) for seq in range(3))
    with pytest.raises(TooManyRequests, match=r"project me has 3 .*concurrent_samples is 4") as caught:
        sample(oplog, 3, 2, payers)
    assert caught.value.retry_after_s == 1
    assert oplog.outcome(f"{SAMPLER}:3") is None
    sample(oplog, 0, 1, payers)  # a repeat is neither refused nor counted
    assert [quotas.used(payer).concurrent_samples for payer in payers] == [3, 3]
    for _ in range(2):
        oplog.finish_sample(done, Result(b"{}"))
        oplog.cancel_sample(cancelled)
    assert [quotas.used(payer).concurrent_samples for payer in payers] == [1, 1]
    sample(oplog, 3, 3, payers)
    lifecycle = RedisLifecycle(client, SETTINGS)
    lifecycle.finish(SESSION, "success")
    assert lifecycle.abort_samples() == 2
    assert oplog.outcome(aborted) is not None
    assert [quotas.used(payer).concurrent_samples for payer in payers] == [0, 0]


@pytest.mark.parametrize(("usage", "kept"), [({"prefill": 30, "drawn": 20}, 50), ({}, 0)], ids=("drawn", "failed"))
def test_tokens_that_a_sample_did_not_use_are_refunded_once(oplog, quotas, usage, kept):
    payers = mine(Limits(tokens_per_s=0.001), Limits(tokens_per_s=0.001))
    request = f"{SAMPLER}:0"
    charge = Charge(payers, 1000, 1)
    oplog.admit_sample(request, SAMPLER, "me", "sample.base", b"ask", "d", 1000, None, 1, charge)
    assert tokens_per_s(quotas, payers) == pytest.approx([1000 / 10] * 2, rel=1e-3)
    for _ in range(2):
        oplog.finish_sample(request, Result(b"{}"), usage)
    assert tokens_per_s(quotas, payers) == pytest.approx([kept / 10] * 2, rel=1e-2)


@pytest.fixture
def called_off(client, oplog):
    def call(request: str, session_ends: bool) -> None:
        if session_ends:
            lifecycle = RedisLifecycle(client, SETTINGS)
            lifecycle.finish(SESSION, "success")
            assert [lifecycle.abort_samples() for _ in range(2)] == [1, 0]
        else:
            assert [oplog.cancel_sample(request) for _ in range(2)] == [True, False]

    return call


@pytest.mark.parametrize("session_ends", [False, True], ids=("cancelled", "of a session that ends"))
def test_a_sample_that_is_called_off_before_a_sampler_began_it_is_given_all_back(
    oplog, quotas, called_off, session_ends
):
    payers = mine(Limits(tokens_per_s=0.001), Limits(tokens_per_s=0.001))
    request = f"{SAMPLER}:0"
    oplog.admit_sample(request, SAMPLER, "me", "sample.base", b"ask", "d", 1000, None, 1, Charge(payers, 1000, 1))
    called_off(request, session_ends)
    assert tokens_per_s(quotas, payers) == pytest.approx([0, 0], abs=1e-3)


@pytest.mark.parametrize("session_ends", [False, True], ids=("cancelled", "of a session that ends"))
def test_a_sample_that_is_called_off_while_it_runs_is_given_back_what_it_did_not_take_once(
    client, oplog, quotas, called_off, session_ends
):
    payers = mine(Limits(tokens_per_s=0.001), Limits(tokens_per_s=0.001))
    request = f"{SAMPLER}:0"
    oplog.admit_sample(request, SAMPLER, "me", "sample.base", b"ask", "d", 1000, None, 1, Charge(payers, 1000, 1))
    assert oplog.claim_sample(request, "sampler/1")
    called_off(request, session_ends)
    oplog.put_off_sample(request, "sampler/0", {"sampling_sample": 7})  # which ran it before, and hears of it late
    assert tokens_per_s(quotas, payers) == pytest.approx([1000 / 10] * 2, rel=1e-2)
    for _ in range(2):
        oplog.put_off_sample(request, "sampler/1", {"sampling_prefill": 30, "sampling_sample": 20, "device": 9})
        assert tokens_per_s(quotas, payers) == pytest.approx([50 / 10] * 2, rel=1e-2)
    assert not client.exists(f"tinsmith:stopped:{request}")


@pytest.mark.parametrize("session_ends", [False, True], ids=("cancelled", "of a session that ends"))
def test_a_sample_that_is_called_off_while_it_runs_counts_what_it_drew_once(client, oplog, called_off, session_ends):
    request, drawn = f"{SAMPLER}:0", {"sampling_prefill": 30, "sampling_prefill_cached": 10, "sampling_sample": 20}
    client.hset(keys.record("samplers", SAMPLER), "prefix", '"models/session:train:0/x"')
    oplog.admit_sample(request, SAMPLER, "me", "sample.base", b"ask", "d", 1000)
    assert oplog.claim_sample(request, "sampler/1")
    called_off(request, session_ends)
    assert used(client) == {}
    oplog.put_off_sample(request, "sampler/0", drawn)  # which ran it before, and hears of it late
    assert used(client) == {}
    for _ in range(2):
        oplog.put_off_sample(request, "sampler/1", drawn | {"device": 40})
        assert not oplog.finish_sample(request, Result(b"{}"), drawn)
    assert used(client) == {f"{kind} session base": amount for kind, amount in drawn.items()}
    assert used_by_runs(client)["sampling_sample session:train:0 base"] == 20
    assert device_ms(client) == 40
    month = RedisPages(client, SETTINGS).this_month("me")
    assert month == {(kind, "base"): amount for kind, amount in (drawn | {"device": 40}).items()}


@pytest.mark.parametrize("ends", ["cancelled just before", "called off then", "with a result"])
def test_a_sample_that_runs_while_its_run_is_deleted_counts_what_it_drew_once(client, oplog, ends):
    """The sampler's record is deleted with the run, before the sampler reports."""
    request, drawn = f"{SAMPLER}:0", {"sampling_prefill": 30, "sampling_sample": 20}
    lifecycle = RedisLifecycle(client, SETTINGS)
    client.hset(keys.record("samplers", SAMPLER), "prefix", '"models/session:train:0/x"')
    oplog.admit_sample(request, SAMPLER, "me", "sample.base", b"ask", "d", 1000)
    lifecycle.move(SESSION, "other")
    assert oplog.claim_sample(request, "sampler/1")
    assert ends != "cancelled just before" or oplog.cancel_sample(request)
    assert lifecycle.end_sampler(SAMPLER, retired=False)
    assert ends != "called off then" or lifecycle.abort_samples() == 1
    for _ in range(2):
        oplog.finish_sample(request, Result(b"{}"), drawn)
        oplog.put_off_sample(request, "sampler/1", drawn)
    assert used(client, "other") == {f"{kind} session base": amount for kind, amount in drawn.items()}
    assert used_by_runs(client, "other")["sampling_sample session:train:0 base"] == 20
    left_s = client.ttl(f"{keys.PREFIX}ended_samplers:{SAMPLER}")
    assert SETTINGS.result_unread_s - 600 < left_s <= SETTINGS.result_unread_s, "the copy of its record expires"


def test_a_sample_that_is_put_back_counts_only_the_attempt_that_ends_it(client, oplog):
    request = f"{SAMPLER}:0"
    oplog.admit_sample(request, SAMPLER, "me", "sample.base", b"ask", "d", 1000)
    for drawn in (7, 9):
        assert oplog.claim_sample(request, "sampler/1")
        oplog.put_off_sample(request, "sampler/1", {"sampling_sample": drawn})
    assert oplog.claim_sample(request, "sampler/2")
    assert oplog.cancel_sample(request)
    oplog.put_off_sample(request, "sampler/1", {"sampling_sample": 9})
    oplog.put_off_sample(request, "sampler/2", {"sampling_sample": 3})
    assert used(client) == {"sampling_sample session base": 3}


def test_more_sequences_than_there_may_be_pass_alone(oplog):
    payers = mine(key=Limits(concurrent_samples=2))
    large = sample(oplog, 0, 5, payers)
    with pytest.raises(TooManyRequests, match="key k has 5 sequences"):
        sample(oplog, 1, 1, payers)
    oplog.finish_sample(large, Result(b"{}"))
    sample(oplog, 1, 1, payers)


def test_sequences_still_count_where_they_were_admitted_when_their_session_moves(client, oplog, quotas):
    request = sample(oplog, 0, 3, mine())
    RedisLifecycle(client, SETTINGS).move(SESSION, "other")
    oplog.finish_sample(request, Result(b"{}"))
    payers = [*mine(), Payer(PROJECT, "other", Limits())]
    assert [quotas.used(payer).concurrent_samples for payer in payers] == [0, 0, 0]


@pytest.mark.parametrize("payer", mine(), ids=("project", "key"))
def test_a_model_is_live_until_it_or_its_session_ends(client, oplog, stored, quotas, payer):
    lifecycle = RedisLifecycle(client, SETTINGS)

    def live() -> int:
        return quotas.used(payer).live_models

    def made(name: str, **changes: Any) -> str:
        model = f"{name}:train:0"
        stored.put_new(Session.namespace, name, dump(Session("me", 0.0)))
        lifecycle.heartbeat(name)
        oplog.create_model(model, dump(replace(Model("me", name, "base", 0.0, key="k"), **changes)))
        return model

    assert live() == 1
    unloaded, deleted, _ = made("a"), made("b"), made("c")
    made("failed", state="failed")
    client.hset(f"tinsmith:models:{made('copied')}", "ended", "copied")
    other = Session("other", 0.0)
    stored.put_new(Session.namespace, "d", dump(other))
    made("d", owner="other", key="another")
    assert live() == 4
    lifecycle.unload(unloaded)
    assert live() == 3
    lifecycle.end_model(deleted)
    assert live() == 2
    lifecycle.finish("c", "success")
    assert live() == 1
    lifecycle.move(SESSION, "other")
    assert live() == (1 if payer.kind == KEY else 0)
    for key in client.scan_iter("tinsmith:runs*"):
        client.delete(key)  # a state server from before the lists existed: a maintenance task makes them
    stored.correct_some("models", "", 100)
    assert live() == (1 if payer.kind == KEY else 0)
    lifecycle.move(SESSION, "me")
    assert live() == 1
    lifecycle.end_model(MODEL)
    assert live() == 0


def test_a_run_that_ended_is_listed_no_more(client, oplog, stored, quotas):
    assert [quotas.used(payer).live_models for payer in mine()] == [1, 1]
    RedisLifecycle(client, SETTINGS).end_model(MODEL)
    assert client.keys("tinsmith:runs:*") == []


def test_runs_of_a_session_that_ended_are_checked_no_more_until_its_next_heartbeat(client, oplog, stored, quotas):
    lifecycle = RedisLifecycle(client, SETTINGS)
    client.zadd(keys.SESSIONS_HEARD, {SESSION: 1})
    assert lifecycle.expire() == [SESSION]
    assert [quotas.used(payer).live_models for payer in mine()] == [0, 0]
    assert client.keys("tinsmith:runs:*") == []
    lifecycle.heartbeat(SESSION)
    assert [quotas.used(payer).live_models for payer in mine()] == [1, 1]


def test_what_others_have_is_not_read_to_count_ones_own(client, oplog, stored, quotas):
    def looks() -> int:
        before = calls()
        assert [quotas.used(payer).live_models for payer in mine()] == [1, 1]
        return calls() - before

    def calls() -> int:
        """Without those of connections, such as a PING after an idle while."""
        reads = ("hget", "hmget", "scard", "smembers", "srandmember", "zscore", "zrange")
        said = client.info("commandstats")
        return sum(said[f"cmdstat_{name}"]["calls"] for name in reads if f"cmdstat_{name}" in said)

    looks()
    alone = looks()
    for other in range(50):
        RedisLifecycle(client, SETTINGS).heartbeat(f"other{other}")
        oplog.create_model(f"other{other}:train:0", dump(Model("other", f"other{other}", "base", 0.0, key="else")))
    assert looks() == alone


def test_a_count_looks_at_no_run_below_the_limit_and_at_no_more_than_500(client, oplog, stored, quotas):
    fields = dump(Model("me", SESSION, "base", 0.0))

    def create(number: int, limit: int) -> None:
        charge = Charge(mine(Limits(live_models=limit)), models=1)
        oplog.admit(f"{SESSION}:train:{number}", 0, "create_model", b"payload", "d", fields, charge)

    def reads(call: Callable[[], object]) -> int:
        client.config_resetstat()
        call()
        return int(client.info("commandstats").get("cmdstat_hmget", {"calls": 0})["calls"])

    def refused() -> None:
        with pytest.raises(LimitReached, match="project me has 702 live models, and its live_models is 700"):
            create(702, 700)

    alone = reads(lambda: create(1, 1000))
    for number in range(2, 701):
        oplog.create_model(f"{SESSION}:train:{number}", fields)
    assert reads(lambda: create(701, 1000)) == alone
    assert 500 <= reads(lambda: quotas.used(mine()[0])) <= 510
    assert 500 <= reads(refused) <= 510


def test_a_run_leaves_the_lists_when_it_is_unloaded_or_its_session_finished_until_its_next_call(client, oplog, stored):
    """A count of many runs looks at some of them only, so it may not find those that ended."""
    lifecycle, other = RedisLifecycle(client, SETTINGS), f"{SESSION}:train:1"
    oplog.create_model(other, dump(Model("me", SESSION, "base", 0.0, key="k")))

    def listed() -> list[set[str]]:
        return [{id_.decode() for id_ in client.smembers(f"tinsmith:runs:{payer.name}")} for payer in mine()]

    def call(seq: int) -> None:
        time.sleep(0.002)  # the times of the call and of what was before are in ms
        oplog.admit(other, seq, "optim_step", b"", "d")

    lifecycle.unload(other)
    assert listed() == [{MODEL}] * 2
    call(0)
    assert listed() == [{MODEL, other}] * 2
    lifecycle.finish(SESSION, "success")
    assert listed() == [set()] * 2
    call(1)
    assert listed() == [{MODEL, other}] * 2


def test_an_unloaded_run_counts_until_its_calls_have_run(client, oplog, quotas):
    """Otherwise any number of runs could have calls waiting."""
    lifecycle, charge = RedisLifecycle(client, SETTINGS), Charge(mine(Limits(live_models=1)), models=1)
    ask(oplog, 0, Charge(mine()), "create_model")
    lifecycle.unload(MODEL)
    with pytest.raises(LimitReached, match="live_models"):
        quotas.take(charge)
    lease = oplog.acquire(MODEL, "a/1")
    assert isinstance(lease, Lease)
    oplog.commit(lease, 0, Result(b"{}"))
    assert quotas.used(charge.payers[0]).live_models == 0
    quotas.take(charge)


def test_runs_of_a_session_that_expired_are_taken_off_the_lists_in_turn(client, oplog, stored):
    client.zadd(keys.SESSIONS_HEARD, {SESSION: 1})
    assert RedisLifecycle(client, SETTINGS).expire() == [SESSION]
    stored.correct_some("models", "", 100)
    assert client.keys("tinsmith:runs:*") == []


def test_runs_of_a_large_session_that_comes_back_count_again_in_slices(client, oplog, stored, quotas):
    """The session has 1,500 runs: one step lists 1,000, and a maintenance task the others."""
    fields = dump(Model("me", SESSION, "base", 0.0))
    for number in range(1, 1500):
        oplog.create_model(f"{SESSION}:train:{number}", fields)
    lifecycle = RedisLifecycle(client, SETTINGS)
    client.zadd(keys.SESSIONS_HEARD, {SESSION: 1})
    assert lifecycle.expire() == [SESSION]
    while client.exists("tinsmith:runs:project:me"):  # each count looks at 500
        assert quotas.used(mine()[0]).live_models < 1500
    lifecycle.heartbeat(SESSION)
    assert quotas.used(mine()[0]).live_models == 1000
    after = stored.correct_some("models", "", 500)
    while after:
        after = stored.correct_some("models", after, 500)
    assert quotas.used(mine()[0]).live_models == 1500


def test_another_model_is_refused_when_there_are_as_many_as_may_be(client, oplog, stored):
    charge = Charge(mine(Limits(live_models=1)), models=1)
    fields = dump(Model("me", SESSION, "base", 0.0))
    second = f"{SESSION}:train:1"
    with pytest.raises(LimitReached, match="project me has 1 live models, and its live_models is 1: finish a session"):
        oplog.admit(second, 0, "create_model", b"payload", "d", fields, charge)
    assert stored.get(Model.namespace, second) is None
    RedisLifecycle(client, SETTINGS).end_model(MODEL)
    assert oplog.admit(second, 0, "create_model", b"payload", "d", fields, charge).fresh
    assert not oplog.admit(second, 0, "create_model", b"payload", "d", fields, charge).fresh, "a repeat is admitted"


def checkpoint(size: int, owner: str = "me", key: str = "k") -> Checkpoint:
    return Checkpoint(owner, MODEL, "weights", "base", "models/x", 1.0, size, {}, [], key=key)


def path(name: object) -> str:
    return f"tinker://{MODEL}/weights/{name}"


def commit(oplog: RedisOpLog, seq: int, name: object, size: int) -> None:
    ask(oplog, seq, Charge(), "save_weights")
    lease = oplog.acquire(MODEL, "a/1")
    assert isinstance(lease, Lease)
    oplog.commit(lease, seq, Result(b"{}"), [(Checkpoint.namespace, path(name), dump(checkpoint(size)))])


def test_the_bytes_of_checkpoints_are_those_that_are_there(client, oplog, stored, quotas):
    """The promise holds after any history of saves, overwrites, copies, deletions and moves."""
    chance, seq = random.Random(1), 0
    payers = [*mine(), Payer(PROJECT, "other", Limits()), Payer(KEY, "k2", Limits())]
    for step in range(120):
        name, size = path(chance.randrange(6)), chance.randrange(4) * 10
        match chance.choice(["save", "put", "put_new", "delete", "delete_same", "move", "note"]):
            case "save":
                commit(oplog, seq, name.rpartition("/")[2], size)
                seq += 1
            case "put":
                stored.put(Checkpoint.namespace, name, dump(checkpoint(size, key=chance.choice(["", "k2"]))))
            case "put_new":
                stored.put_new(Checkpoint.namespace, name, dump(checkpoint(size, "other")))
            case "delete":
                stored.delete(Checkpoint.namespace, name)
            case "delete_same":
                stored.delete_same(Checkpoint.namespace, name, dump(checkpoint(size)))
            case "move":
                RedisLifecycle(client, SETTINGS).move(SESSION, chance.choice(["me", "other"]))
            case "note":
                stored.update(Checkpoint.namespace, name, {"public": "true"})
        if step == 60:
            client.delete("tinsmith:stored")  # a state server from before the sums existed: the next change makes them
            continue
        there = [fields for _, fields in stored.list(Checkpoint.namespace)]
        for payer in payers:
            field = "owner" if payer.kind == PROJECT else "key"
            kept = [int(fields["size_bytes"]) for fields in there if fields[field] == f'"{payer.id}"']
            assert quotas.used(payer).storage_bytes == sum(kept), (step, payer)


def test_a_save_is_refused_when_the_bytes_are_used_up(oplog, stored):
    stored.put_new(Checkpoint.namespace, path("a"), dump(checkpoint(100)))
    for limit, size, passes in ((101, 0, True), (100, 0, False), (150, 50, True), (149, 50, False)):
        charge = Charge(mine(key=Limits(storage_bytes=limit)), stores=True, stored=size)
        if passes:
            ask(oplog, limit, charge, "save_weights")
        else:
            with pytest.raises(LimitReached, match=f"key k has 100 bytes of .* storage_bytes is {limit}"):
                ask(oplog, limit, charge, "save_weights")
    charge = Charge(mine(Limits(storage_bytes=0)), stores=True)
    assert not ask(oplog, 101, charge, "save_weights"), "a repeat is admitted"
