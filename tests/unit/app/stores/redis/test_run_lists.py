"""The runs of projects by their lists, beside processes that know no such lists."""

from __future__ import annotations

import json
import random

import pytest
import redis

from app.domain.records import Checkpoint, Model, Sampler, Session
from app.settings import EngineSettings
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords, dump, load
from tests.unit.app.stores.redis.lists import calls, earlier_version

LISTS = ("tinsmith:models_of:*", "tinsmith:model_owners")


@pytest.fixture
def stored(client: redis.Redis) -> RedisRecords:
    records = RedisRecords(client)
    for session in ("s", "t"):
        records.put_new(Session.namespace, session, dump(Session("me", 0.0)))
    return records


@pytest.fixture
def oplog(client: redis.Redis) -> RedisOpLog:
    return RedisOpLog(client, EngineSettings())


@pytest.fixture
def lifecycle(client: redis.Redis) -> RedisLifecycle:
    return RedisLifecycle(client, EngineSettings())


def make(oplog: RedisOpLog, run: str, owner: str = "me", created: float = 1.0) -> None:
    fields = dump(Model(owner, run.partition(":")[0], "base", created))
    oplog.admit(run, 0, "create_model", b"", "", fields)


def owned(stored: RedisRecords, *projects: str) -> set[str]:
    """The runs that a look at all of them finds."""
    return {id_ for id_, fields in stored.list("models") if load(Model, fields).owner in projects}


def listed(stored: RedisRecords, *projects: str) -> set[str]:
    return {id_ for _, id_ in stored.list_runs(projects)}


def test_a_listing_costs_the_same_however_many_runs_there_are(client, stored, oplog):
    def cost() -> int:
        before = calls(client)
        stored.list_runs({"me", "mine"})
        return calls(client) - before

    make(oplog, "s:train:0", created=2.5)
    alone = cost()
    for number in range(1000):
        oplog.create_model(f"s:train:{number + 1}", dump(Model("me" if number % 2 else "other", "s", "base", 1.0)))
    assert cost() == alone
    assert listed(stored, "me", "mine") == owned(stored, "me") and len(owned(stored, "me")) == 501
    assert (2.5, "s:train:0") in stored.list_runs({"me"})


@pytest.mark.parametrize("seed", range(4))
def test_no_run_is_missing_after_any_history_of_this_and_an_earlier_version(client, stored, oplog, lifecycle, seed):
    chance = random.Random(seed)

    def change() -> None:
        session = chance.choice("st")
        run = f"{session}:train:{chance.randrange(8)}"
        match chance.randrange(5):
            case 0:
                oplog.create_model(run, dump(Model(chance.choice(("me", "other")), session, "base", 1.0)))
            case 1:
                if stored.get("models", run) is None:
                    make(oplog, run, chance.choice(("me", "other")))
            case 2:
                lifecycle.move(session, chance.choice(("me", "other")))
            case 3:
                lifecycle.end_model(run)
            case 4:
                stored.delete("models", run)

    for _ in range(60):
        if chance.random() < 0.3:
            with earlier_version(client, LISTS):
                change()
            stored.correct_some("models", "", 100)
        else:
            change()
        if chance.random() < 0.5:
            assert listed(stored, "me") == owned(stored, "me")
            assert listed(stored, "other", "nobody") == owned(stored, "other")


def test_runs_stored_before_the_lists_are_found_at_once(client, stored, oplog):
    with earlier_version(client, LISTS):
        for number in range(3):
            make(oplog, f"s:train:{number}", created=float(number))
    assert sorted(stored.list_runs({"me"})) == [(float(number), f"s:train:{number}") for number in range(3)]
    assert client.hlen("tinsmith:model_owners") == 3, "the next listing reads no record"


def test_a_moved_run_is_on_the_list_of_its_new_project(stored, oplog, lifecycle):
    make(oplog, "s:train:0")
    lifecycle.move("s", "other")
    assert (listed(stored, "me"), listed(stored, "other")) == (set(), {"s:train:0"})


def test_the_ids_of_a_session_are_read_without_records(client, stored, oplog):
    for run in ("s:train:0", "s:train:1", "t:train:0"):
        make(oplog, run)
    client.config_resetstat()
    assert list(stored.ids("models", "s:train:")) == ["s:train:0", "s:train:1"]
    assert {name for name in client.info("commandstats") if name.startswith("cmdstat_hget")} == set()


def test_a_large_session_moves_in_slices_with_all_that_is_made_meanwhile(client, stored, oplog, lifecycle):
    """Counts the records that a script writes, since everybody else waits for it."""
    fields = {"models": Model("me", "s", "base", 1.0), "samplers": Sampler("me", "s", "base", 1.0)}
    checkpoint = Checkpoint("me", "s:train:0", "weights", "base", "p", 1.0, 1, {}, [])
    for number in range(150):
        stored.put_new("models", f"s:train:{number}", dump(fields["models"]))
        stored.put_new("samplers", f"s:sample:{number}", dump(fields["samplers"]))
        stored.put_new("checkpoints", f"tinker://s:train:{number}/weights/a", dump(checkpoint))
    stored.put_new("models", "s2:train:0", dump(fields["models"]))
    client.config_resetstat()
    lifecycle.move("s", "other")
    scripts = client.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert scripts == 3, "450 records, 200 at a time"
    for namespace in ("models", "samplers", "checkpoints"):
        owners = {id_: json.loads(fields["owner"]) for id_, fields in stored.list(namespace)}
        assert owners.pop("s2:train:0", "me") == "me"
        assert set(owners.values()) == {"other"} and len(owners) == 150


def test_a_later_move_wins_over_slices_that_are_left(stored, oplog, lifecycle):
    for number in range(250):
        stored.put_new("models", f"s:train:{number:03}", dump(Model("me", "s", "base", 1.0)))
    left = lifecycle._run("move_session", "s", '"other"')
    assert left == [1, b"s:train:199"]
    lifecycle.move("s", "third")
    assert lifecycle._run("move_session", "s", '"other"', *left) == 0
    assert listed(stored, "third") == owned(stored, "third") and len(owned(stored, "third")) == 250
