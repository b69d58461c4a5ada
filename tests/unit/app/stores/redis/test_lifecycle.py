"""Ends of sessions and models, on a real server."""

from __future__ import annotations

import json
import time

import pytest
import redis

from app.domain.records import Model, Sampler, Session
from app.domain.results import Result
from app.errors import Fenced, Gone, NotFound
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords, dump, load
from app.stores.redis.types import Holder, Lease

SESSION = "session"
MODEL = f"{SESSION}:train:0"
SAMPLER = f"{SESSION}:sample:0"
OK = Result(b"{}")
PATIENT = EngineSettings()
HASTY = EngineSettings(session_s=0.001, retain_s=0.001, orphan_s=0.001)


@pytest.fixture
def stored(client: redis.Redis) -> RedisRecords:
    records = RedisRecords(client)
    records.put_new(Session.namespace, SESSION, dump(Session("me", 0.0)))
    records.put_new(Sampler.namespace, SAMPLER, dump(Sampler("me", SESSION, "base", 0.0)))
    return records


@pytest.fixture
def oplog(client: redis.Redis, stored: RedisRecords) -> RedisOpLog:
    log = RedisOpLog(client, PATIENT)
    assert log.create_model(MODEL, dump(Model("me", SESSION, "base", 0.0)))
    return log


@pytest.fixture
def lifecycle(client: redis.Redis, oplog: RedisOpLog) -> RedisLifecycle:
    made = RedisLifecycle(client, PATIENT)
    made.heartbeat(SESSION)
    return made


def hasty(client: redis.Redis) -> RedisLifecycle:
    """A lifecycle whose timeouts are short."""
    time.sleep(0.01)
    return RedisLifecycle(client, HASTY)


def status(stored: RedisRecords) -> str:
    return load(Session, stored.get(Session.namespace, SESSION) or {}).status


def admit(oplog: RedisOpLog, seq: int = 0, kind: str = "forward_backward") -> None:
    oplog.admit(MODEL, seq, kind, b"payload", f"digest {seq}")


def own(oplog: RedisOpLog, worker: str = "a/1") -> Lease:
    lease = oplog.acquire(MODEL, worker)
    assert isinstance(lease, Lease)
    return lease


def test_only_a_session_without_heartbeats_expires(client, lifecycle, stored):
    assert lifecycle.expire() == []
    assert (hasty(client).expire(), status(stored)) == ([SESSION], "expired")
    assert hasty(client).expire() == [], "once"


@pytest.mark.parametrize("sign", ["heartbeat", "op", "sample"])
def test_a_heartbeat_an_op_or_a_sample_brings_an_expired_session_back(client, lifecycle, oplog, stored, sign):
    hasty(client).expire()
    assert lifecycle.unwanted([MODEL]) == {MODEL}
    if sign == "heartbeat":
        lifecycle.heartbeat(SESSION)
    elif sign == "op":
        admit(oplog)
    else:
        oplog.admit_sample(f"{SAMPLER}:1", SAMPLER, "me", "sample.base", b"ask", "d")
    assert (lifecycle.unwanted([MODEL]), status(stored)) == (set(), "open")
    assert hasty(client).expire() == [SESSION], "and its time starts anew"


@pytest.mark.parametrize("sign", ["heartbeat", "op", "sample"])
def test_each_sign_of_life_puts_the_end_off(client, lifecycle, oplog, sign):
    client.zadd(keys.SESSIONS_HEARD, {SESSION: 1})
    if sign == "heartbeat":
        lifecycle.heartbeat(SESSION)
    elif sign == "op":
        admit(oplog)
    else:
        oplog.admit_sample(f"{SAMPLER}:1", SAMPLER, "me", "sample.base", b"ask", "d")
    assert lifecycle.expire() == []


def test_the_first_reason_of_a_finish_stays_and_a_late_heartbeat_does_not_open_it(client, lifecycle, stored):
    lifecycle.finish(SESSION, "errored")
    lifecycle.finish(SESSION, "success")
    lifecycle.heartbeat(SESSION)
    assert (status(stored), lifecycle.unwanted([MODEL])) == ("errored", {MODEL})
    assert hasty(client).expire() == []


def test_a_finished_session_that_still_beats_is_kept(client, lifecycle):
    lifecycle.finish(SESSION, "success")
    client.zadd(keys.SESSIONS_ENDED, {SESSION: 1})
    assert lifecycle.retired() == [SESSION]
    lifecycle.heartbeat(SESSION)
    assert lifecycle.retired() == []


def test_an_op_after_the_finish_is_served_and_leaves_the_reason(client, lifecycle, oplog, stored):
    lifecycle.finish(SESSION, "success")
    admit(oplog)
    assert (lifecycle.unwanted([MODEL]), status(stored)) == (set(), "success")
    assert hasty(client).expire() == [SESSION]
    assert status(stored) == "success"


def test_an_expired_session_can_be_finished(client, lifecycle, stored):
    hasty(client).expire()
    lifecycle.finish(SESSION, "success")
    assert status(stored) == "success"


def test_a_model_with_something_to_do_is_wanted_though_its_session_has_ended(lifecycle, oplog):
    admit(oplog)
    lifecycle.finish(SESSION, "success")
    assert lifecycle.unwanted([MODEL]) == set()
    oplog.commit(own(oplog), 0, OK)
    assert lifecycle.unwanted([MODEL]) == {MODEL}


def test_what_the_server_does_not_know_is_unwanted(lifecycle):
    assert lifecycle.unwanted([MODEL, "other:train:0"]) == {"other:train:0"}
    assert lifecycle.unwanted([]) == set()


def test_a_session_is_retired_long_after_its_end_and_forgotten_only_while_it_has_ended(client, lifecycle):
    assert hasty(client).retired() == []
    lifecycle.finish(SESSION, "success")
    assert lifecycle.retired() == []
    assert hasty(client).retired() == [SESSION]
    lifecycle.forget(SESSION)
    assert hasty(client).retired() == [SESSION], "it beat, or was finished, a moment ago"
    hasty(client).forget(SESSION)
    assert hasty(client).retired() == []


def test_an_ended_model_keeps_nothing_but_its_record(client, lifecycle, oplog):
    for seq in range(3):
        admit(oplog, seq)
    lease = own(oplog)
    oplog.commit(lease, 0, OK)
    oplog.set_snapshot(lease, 0, f"models/{MODEL}/snapshots/0/0-1")
    lifecycle.end_model(MODEL)
    left = {key.decode() for key in client.keys("*") if MODEL.encode() in key}
    assert left == {keys.model(MODEL), *(keys.future(f"{MODEL}:{seq}") for seq in range(3))}
    head = client.hgetall(keys.model(MODEL))
    assert (head[b"ended"], head[b"snapshot"]) == (b"deleted", b"")
    assert int(client.get(keys.PREFIX + "payload_bytes")) == 0
    assert all(client.ttl(keys.future(f"{MODEL}:{seq}")) > 0 for seq in range(3))
    assert oplog.pending() == []
    assert client.hlen(keys.PREFIX + "pending_queue") == 0


def test_what_waits_for_an_ended_model_fails_as_the_users_doing_and_results_stay(client, lifecycle, oplog):
    admit(oplog, 0)
    admit(oplog, 1)
    oplog.commit(own(oplog), 0, OK)
    lifecycle.end_model(MODEL)
    assert oplog.future(f"{MODEL}:0", {"me"}).result == OK
    failed = oplog.future(f"{MODEL}:1", {"me"}).result
    assert failed is not None and failed.failed
    assert json.loads(failed.body)["category"] == "user"


def test_the_calls_that_wait_for_an_ended_model_are_reported_once(lifecycle, oplog):
    for seq in (0, 1, 3):
        admit(oplog, seq)
    assert oplog.refuse(MODEL, 2, "bad")
    oplog.commit(own(oplog), 0, OK)
    for _ in range(2):
        lifecycle.end_model(MODEL)
        lifecycle.end_calls()
    assert lifecycle.take_revoked() == [f"{MODEL}:1", f"{MODEL}:3"]
    assert lifecycle.take_revoked() == []


def test_the_end_of_a_model_wakes_the_polls_of_what_waits(client, lifecycle, oplog):
    admit(oplog, 0)
    admit(oplog, 1)
    oplog.commit(own(oplog), 0, OK)
    with client.pubsub() as channel:
        channel.subscribe(keys.DONE_CHANNEL)
        assert channel.get_message(timeout=60)["type"] == "subscribe"
        lifecycle.end_model(MODEL)
        client.publish(keys.DONE_CHANNEL, "end")
        published = [channel.get_message(timeout=60)["data"] for _ in range(2)]
    assert published == [f"{MODEL}:1".encode(), b"end"]


def test_an_owner_of_an_ended_model_can_do_nothing_more(lifecycle, oplog):
    admit(oplog)
    lease = own(oplog)
    assert lifecycle.end_model(MODEL) == Holder("base", "a")
    for late in (
        lambda: oplog.next(lease, 0),
        lambda: oplog.commit(lease, 0, OK),
        lambda: oplog.set_snapshot(lease, 0, "x"),
    ):
        with pytest.raises(Fenced):
            late()
    assert oplog.renew([MODEL], "a/1") == [MODEL]
    assert lifecycle.unwanted([MODEL]) == {MODEL}


def test_an_ended_model_can_not_be_owned_or_called_but_a_repeat_finds_its_future(lifecycle, oplog):
    admit(oplog, 0)
    lifecycle.end_model(MODEL)
    for late in (lambda: own(oplog), lambda: admit(oplog, 1)):
        with pytest.raises(Gone, match="create a new model"):
            late()
    assert not oplog.refuse(MODEL, 1, "bad")
    assert not oplog.create_model(MODEL, dump(Model("me", SESSION, "base", 0.0)))
    again = oplog.admit(MODEL, 0, "forward_backward", b"payload", "digest 0")
    assert not again.fresh


def test_ending_a_model_again_changes_nothing_and_an_unknown_one_is_none(client, lifecycle):
    lifecycle.end_model(MODEL)
    before = client.hgetall(keys.model(MODEL))
    assert lifecycle.end_model(MODEL) == Holder("base", "")
    assert client.hgetall(keys.model(MODEL)) == before
    assert lifecycle.end_model("other:train:0") is None


def test_a_model_is_not_retired_once_its_session_lives_again(client, lifecycle, oplog):
    lifecycle.finish(SESSION, "success")
    assert lifecycle.end_model(MODEL, retired=True) is None, "too early"
    time.sleep(0.01)
    admit(oplog)
    assert hasty(client).end_model(MODEL, retired=True) is None, "an Op came"
    lifecycle.finish(SESSION, "success")
    assert hasty(client).end_model(MODEL, retired=True) == Holder("base", "")
    with pytest.raises(Gone):
        own(oplog)


def test_a_sampler_is_not_retired_once_its_session_lives_again(client, lifecycle, stored):
    lifecycle.finish(SESSION, "success")
    assert not lifecycle.end_sampler(SAMPLER), "too early"
    RedisOpLog(client, PATIENT).admit_sample(f"{SAMPLER}:1", SAMPLER, "me", "sample.base", b"ask", "d")
    assert not hasty(client).end_sampler(SAMPLER), "a sample came"
    assert stored.get(Sampler.namespace, SAMPLER)
    lifecycle.finish(SESSION, "success")
    assert hasty(client).end_sampler(SAMPLER)
    assert client.zcard(keys.index(Sampler.namespace)) == 0
    assert stored.get(Sampler.namespace, SAMPLER) is None
    assert not hasty(client).end_sampler(SAMPLER), "there is none any more"


def test_of_many_samplers_those_of_a_session_that_lives_stay(client, lifecycle, stored):
    other = "session2:sample:0"
    stored.put_new(Sampler.namespace, other, dump(Sampler("me", "session2", "base", 0.0)))
    lifecycle.heartbeat("session2")
    lifecycle.finish(SESSION, "success")
    time.sleep(0.01)
    hasty(client).end_samplers([SAMPLER, "none", other], retired=True)
    assert [sampler for sampler, _ in stored.list(Sampler.namespace)] == [other]
    lifecycle.end_samplers([other], retired=False)
    assert list(stored.list(Sampler.namespace)) == []


def test_a_retired_session_is_forgotten_with_its_record_but_not_once_it_lives_again(client, lifecycle, oplog, stored):
    lifecycle.finish(SESSION, "success")
    assert not lifecycle.forget(SESSION), "too early"
    admit(oplog)
    assert not hasty(client).forget(SESSION), "an Op came"
    assert stored.get(Session.namespace, SESSION)
    lifecycle.finish(SESSION, "success")
    assert hasty(client).forget(SESSION)
    assert stored.get(Session.namespace, SESSION) is None
    assert client.zcard(keys.index(Session.namespace)) == 0
    assert not hasty(client).forget(SESSION), "there is none any more"


def test_holders_are_the_nodes_that_have_a_model_now(lifecycle, oplog):
    other = f"{SESSION}:train:1"
    oplog.create_model(other, dump(Model("me", SESSION, "base", 0.0)))
    assert lifecycle.holders([MODEL, other]) == []
    own(oplog, "a/1")
    assert lifecycle.holders([MODEL, other, "unknown"]) == [Holder("base", "a")]


def test_a_full_models_holder_is_known_as_one_and_its_ops_wait_for_trainers_of_their_own(lifecycle, oplog):
    full = f"{SESSION}:train:1"
    oplog.create_model(full, dump(Model("me", SESSION, "base", 0.0, full=True)))
    oplog.acquire(full, "a/1")
    assert lifecycle.holders([full]) == [Holder("base", "a", full=True)]
    oplog.refuse(full, 1, "bad")
    oplog.admit(full, 0, "create_model", b"payload", "digest")
    admit(oplog)
    assert {waiting.id: waiting.queue for waiting in oplog.pending()} == {full: "full.base", MODEL: "train.base"}
    assert lifecycle.end_model(full) == Holder("base", "a", full=True)


def test_the_loads_of_a_journal_are_its_creation_and_its_load_weights(lifecycle, oplog):
    other = f"{SESSION}:train:1"
    oplog.create_model(other, dump(Model("me", SESSION, "base", 0.0)))
    oplog.admit(other, 0, "create_model", b"payload", "digest")
    for seq, kind in enumerate(("create_model", "forward_backward", "load_weights", "optim_step")):
        admit(oplog, seq, kind)
    assert list(lifecycle.loads([MODEL, "unknown", other])) == [(MODEL, 0), (MODEL, 2), (other, 0)]


def test_only_what_was_unreferenced_every_time_for_long_is_overdue(client, lifecycle):
    assert lifecycle.overdue(["a", "b"]) == []
    assert sorted(hasty(client).overdue(["a", "b"])) == ["a", "b"]
    assert lifecycle.overdue(["b"]) == []
    client.zadd(keys.ORPHANS, {"b": 1})
    assert lifecycle.overdue(["a", "b"]) == ["b"], "what was referred to in between starts anew"
    assert lifecycle.overdue([]) == []
    assert client.zcard(keys.ORPHANS) == 0


def test_a_model_whose_creation_failed_says_so(oplog, stored):
    admit(oplog, 0, "create_model")
    oplog.commit(own(oplog), 0, Result(b"{}", failed=True))
    assert load(Model, stored.get(Model.namespace, MODEL) or {}).state == "failed"


def test_any_other_failure_leaves_the_model_as_it_is(oplog, stored):
    admit(oplog, 0, "forward_backward")
    oplog.commit(own(oplog), 0, Result(b"{}", failed=True))
    assert load(Model, stored.get(Model.namespace, MODEL) or {}).state == "creating"


def test_a_foreign_model_is_still_not_found(lifecycle, oplog):
    with pytest.raises(NotFound):
        oplog.acquire("other:train:0", "a/1")
