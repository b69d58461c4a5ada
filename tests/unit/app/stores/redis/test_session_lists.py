"""The sessions of projects by their lists, beside processes that know no such lists, and the limit of live ones."""

from __future__ import annotations

import json
import random

import pytest
import redis

from app.domain.limits import Charge, Limits, Payer
from app.domain.records import Session
from app.errors import LimitReached
from app.settings import EngineSettings
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.limits import RedisQuotas
from app.stores.redis.records import RedisRecords, dump, load
from tests.unit.app.stores.redis.lists import calls, earlier_version

LISTS = ("tinsmith:sessions_of:*", "tinsmith:session_owners", "tinsmith:sessions_live:*")
# A session ends at once, and is removed at once.
HASTY = EngineSettings(session_s=0.001, retain_s=0.001)
HERE, KEY = Payer("project", "me", Limits(live_sessions=2)), Payer("key", "k", Limits())


@pytest.fixture
def stored(client: redis.Redis) -> RedisRecords:
    return RedisRecords(client)


@pytest.fixture
def lifecycle(client: redis.Redis) -> RedisLifecycle:
    return RedisLifecycle(client, EngineSettings())


def put(stored: RedisRecords, session: str, owner: str = "me", created: float = 1.0) -> None:
    stored.put_new("sessions", session, dump(Session(owner, created)))


def opened(lifecycle: RedisLifecycle, session: str, payers: tuple[Payer, ...] = (HERE, KEY)) -> None:
    fields = dump(Session("me", 1.0)) | {"key": json.dumps("k")}
    lifecycle.open(session, fields, Charge(payers, sessions=1))


def owned(stored: RedisRecords, *projects: str) -> set[str]:
    """The sessions that a look at all of them finds."""
    return {id_ for id_, fields in stored.list("sessions") if load(Session, fields).owner in projects}


def listed(stored: RedisRecords, *projects: str) -> set[str]:
    return {id_ for _, id_ in stored.list_sessions(projects)}


def live(client: redis.Redis, payer: Payer = HERE) -> int:
    return RedisQuotas(client, EngineSettings()).used(payer).live_sessions


def test_a_listing_costs_the_same_however_many_sessions_there_are(client, stored):
    def cost() -> int:
        before = calls(client)
        stored.list_sessions({"me", "mine"})
        return calls(client) - before

    put(stored, "first", created=2.5)
    alone = cost()
    for number in range(1000):
        put(stored, f"s{number}", "me" if number % 2 else "other")
    assert cost() == alone
    assert listed(stored, "me", "mine") == owned(stored, "me") and len(owned(stored, "me")) == 501
    assert (2.5, "first") in stored.list_sessions({"me"})


@pytest.mark.parametrize("seed", range(4))
def test_no_session_is_missing_after_any_history_of_this_and_an_earlier_version(client, stored, lifecycle, seed):
    chance = random.Random(seed)
    hasty = RedisLifecycle(client, HASTY)

    def change() -> None:
        session = f"s{chance.randrange(12)}"
        match chance.randrange(5):
            case 0 | 1:
                put(stored, session, chance.choice(("me", "other")))
            case 2:
                lifecycle.heartbeat(session)
            case 3:
                lifecycle.finish(session, "success")
                hasty.forget(session)
            case 4:
                stored.delete("sessions", session)

    for _ in range(60):
        if chance.random() < 0.3:
            with earlier_version(client, LISTS):
                change()
            stored.correct_some("sessions", "", 100)
        else:
            change()
        if chance.random() < 0.5:
            assert listed(stored, "me") == owned(stored, "me")
            assert listed(stored, "other", "nobody") == owned(stored, "other")


def test_sessions_stored_before_the_lists_are_found_at_once(client, stored):
    with earlier_version(client, LISTS):
        for number in range(3):
            put(stored, f"s{number}", created=float(number))
    assert sorted(stored.list_sessions({"me"})) == [(0.0, "s0"), (1.0, "s1"), (2.0, "s2")]
    assert client.hlen("tinsmith:session_owners") == 3, "the next listing reads no record"


def test_a_session_that_an_earlier_version_removed_or_moved_is_corrected(client, stored, lifecycle):
    for session in ("gone", "moved", "stays"):
        put(stored, session)
    with earlier_version(client, LISTS):
        stored.delete("sessions", "gone")
        lifecycle.move("moved", "other")
    assert listed(stored, "me") == {"stays"}
    assert listed(stored, "other") == {"moved"}


def test_the_lists_are_corrected_in_turn(client, stored):
    with earlier_version(client, LISTS):
        for number in range(5):
            put(stored, f"s{number}")
    after, rounds = stored.correct_some("sessions", "", 2), 1
    while after:
        after, rounds = stored.correct_some("sessions", after, 2), rounds + 1
    assert (rounds, client.zcard("tinsmith:sessions_of:me")) == (3, 5)


def test_a_moved_session_is_on_the_list_of_its_new_project(client, stored, lifecycle):
    opened(lifecycle, "s")
    lifecycle.move("s", "other")
    assert (listed(stored, "me"), listed(stored, "other")) == (set(), {"s"})
    assert [live(client, payer) for payer in (HERE, Payer("project", "other", Limits()), KEY)] == [0, 1, 1]


def test_a_session_that_is_opened_again_stays_as_it_is(client, stored, lifecycle):
    for session in ("a", "b"):
        opened(lifecycle, session)
    lifecycle.finish("b", "success")
    opened(lifecycle, "c")
    before = list(stored.read("sessions", ["a", "b"]))
    opened(lifecycle, "a")
    opened(lifecycle, "b")
    assert (list(stored.read("sessions", ["a", "b"])), live(client)) == (before, 2)


def test_a_session_over_the_limit_is_refused_until_another_has_ended(client, stored, lifecycle):
    for session in ("a", "b"):
        opened(lifecycle, session)
    refusal = "project me has 2 sessions that have not ended, and its live_sessions is 2: finish one"
    with pytest.raises(LimitReached, match=refusal):
        opened(lifecycle, "c")
    assert owned(stored, "me") == {"a", "b"}
    lifecycle.finish("a", "success")
    assert [live(client), live(client, KEY)] == [1, 1]
    opened(lifecycle, "c")
    assert live(client) == 2


def test_a_new_session_looks_at_no_other_below_the_limit_and_at_no_more_than_500(client, stored, lifecycle):
    def looks(session: str, limit: int) -> int:
        client.config_resetstat()
        opened(lifecycle, session, (Payer("project", "me", Limits(live_sessions=limit)),))
        return int(client.info("commandstats")["cmdstat_zscore"]["calls"])

    alone = looks("first", 700)
    for number in range(699):
        opened(lifecycle, f"s{number}", ())
    with pytest.raises(LimitReached, match="project me has 700 sessions"):
        looks("one more", 700)
    assert 500 <= client.info("commandstats")["cmdstat_zscore"]["calls"] <= 510
    lifecycle.finish("s7", "success")
    assert looks("one more", 700) == alone


def test_a_key_has_a_limit_of_its_own(client, lifecycle):
    payers = Payer("project", "me", Limits()), Payer("key", "k", Limits(live_sessions=1))
    opened(lifecycle, "a", payers)
    with pytest.raises(LimitReached, match="key k has 1 sessions"):
        opened(lifecycle, "b", payers)
    opened(lifecycle, "b", payers[:1])


def test_a_session_that_comes_back_counts_again(client, lifecycle):
    opened(lifecycle, "a")
    RedisLifecycle(client, HASTY.model_copy(update={"session_s": -1.0})).expire()
    assert live(client) == 0
    opened(lifecycle, "b")
    lifecycle.heartbeat("a")
    assert [live(client), live(client, KEY)] == [2, 2]


def test_the_lists_of_live_sessions_keep_no_ended_one(client, stored, lifecycle):
    opened(lifecycle, "a")
    lifecycle.finish("a", "success")
    stored.correct_some("sessions", "", 100)
    assert not [*client.scan_iter("tinsmith:sessions_live:*")]


def test_a_session_of_an_earlier_version_counts_once_it_is_listed(client, stored, lifecycle):
    with earlier_version(client, LISTS):
        put(stored, "a")
        lifecycle.heartbeat("a")
    stored.correct_some("sessions", "", 100)
    assert live(client) == 1
