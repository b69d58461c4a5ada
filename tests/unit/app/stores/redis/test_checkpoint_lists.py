"""The checkpoints of projects by their lists, beside processes that know no such lists."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import redis

from app.domain.records import Checkpoint, Session
from app.settings import EngineSettings
from app.stores.redis import records
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords, dump, load
from app.stores.redis.types import Record
from tests.unit.app.stores.redis.lists import calls, earlier_version

LISTS = "tinsmith:checkpoints_of:"
SESSIONS = ("s0", "s1")


@pytest.fixture
def stored(client: redis.Redis) -> RedisRecords:
    return RedisRecords(client)


def path(session: str, name: object) -> str:
    return f"tinker://{session}:train:0/weights/{name}"


def fields(owner: str = "me", size: int = 10) -> Record:
    return dump(Checkpoint(owner, "s0:train:0", "weights", "base", "models/x", 1.0, size, {}, []))


def put(stored: RedisRecords, name: object, owner: str = "me", size: int = 10) -> str:
    stored.put("checkpoints", path("s0", name), fields(owner, size))
    return path("s0", name)


def owned(stored: RedisRecords, *projects: str) -> dict[str, Record]:
    """The checkpoints that a look at all of them finds."""
    found = stored.list("checkpoints")
    return {path: fields for path, fields in found if load(Checkpoint, fields).owner in projects}


def listing(client: redis.Redis, stored: RedisRecords, *projects: str) -> int:
    """The number of commands of a listing."""
    before = calls(client)
    stored.list_checkpoints(projects)
    return calls(client) - before


def test_a_listing_reads_nothing_of_other_projects(client, stored):
    for name in range(3):
        put(stored, name)
    alone = listing(client, stored, "me", "mine")
    for name in range(1000):
        put(stored, f"theirs{name}", "other")
    assert listing(client, stored, "me", "mine") == alone
    assert stored.list_checkpoints({"me", "mine"}) == owned(stored, "me")


@pytest.mark.parametrize("seed", range(4))
def test_lists_are_complete_after_any_history_of_this_and_an_earlier_version(client, stored, seed):
    chance, lifecycle = random.Random(seed), RedisLifecycle(client, EngineSettings())
    for session in SESSIONS:
        stored.put("sessions", session, dump(Session("me", 0.0)))

    def change() -> None:
        name = path(chance.choice(SESSIONS), chance.randrange(4))
        record = fields(chance.choice(["me", "other"]), chance.choice([10, 20]))
        match chance.choice(["put", "put_new", "delete", "delete_same", "move", "note"]):
            case "put":
                stored.put("checkpoints", name, record)
            case "put_new":
                stored.put_new("checkpoints", name, record)
            case "delete":
                stored.delete("checkpoints", name)
            case "delete_same":
                stored.delete_same("checkpoints", name, record)
            case "move":
                lifecycle.move(chance.choice(SESSIONS), chance.choice(["me", "other"]))
            case "note":
                stored.update("checkpoints", name, {"public": "true"})

    for _ in range(150):
        if chance.random() < 0.3:
            with earlier_version(client, [f"{LISTS}*"]):
                change()
        else:
            change()
        if chance.random() < 0.5:
            for projects in (("me",), ("other",), ("me", "other"), ("else",)):
                assert stored.list_checkpoints(projects) == owned(stored, *projects)


@pytest.mark.parametrize("gone", ["deleted", "somebody else's"])
def test_a_save_of_an_earlier_version_in_place_of_one_of_the_same_size_is_listed(client, stored, gone):
    first = put(stored, "first")
    with earlier_version(client, [f"{LISTS}*"]):
        if gone == "deleted":
            stored.delete("checkpoints", first)
        else:
            put(stored, "first", "other")
        second = put(stored, "second")
    assert stored.list_checkpoints(["me"]).keys() == {second}
    assert client.smembers(f"{LISTS}me") == {second.encode()}, "the next listing finds nothing wrong"


@pytest.mark.parametrize("sums", [True, False], ids=["with sums", "without sums"])
def test_the_first_listing_of_an_earlier_versions_data_makes_the_lists(client, stored, sums):
    with earlier_version(client, [f"{LISTS}*"]):
        for name in range(20):
            put(stored, name, ("me", "other")[name % 2])
    if not sums:
        client.delete("tinsmith:stored")
    first = listing(client, stored, "me")
    assert listing(client, stored, "me") < first
    assert stored.list_checkpoints(["me"]) == owned(stored, "me")
    assert client.scard(f"{LISTS}me") == 10


def test_a_wrong_list_is_no_hindrance_while_the_server_takes_no_writes(client, stored):
    with earlier_version(client, [f"{LISTS}*"]):
        put(stored, "a")
    client.config_set("min-replicas-to-write", 1)
    try:
        assert stored.list_checkpoints(["me"]) == owned(stored, "me") != {}
    finally:
        client.config_set("min-replicas-to-write", 0)


def test_a_deletion_in_between_is_no_reason_to_read_those_of_others(client, stored, monkeypatch):
    kept, gone = put(stored, "kept"), put(stored, "gone")
    read = stored.read

    def read_late(*asked):
        stored.delete("checkpoints", gone)
        return read(*asked)

    monkeypatch.setattr(stored, "read", read_late)
    monkeypatch.setattr(stored, "list", None)
    assert stored.list_checkpoints(["me"]).keys() == {kept}


def test_of_a_run_the_public_checkpoints_and_those_of_the_projects_are_found_in_one_call(
    client: redis.Redis, stored: RedisRecords
) -> None:
    own, public = put(stored, "own"), path("s0", "public")
    stored.put("checkpoints", public, fields("other") | {"public": "true"})
    for i in range(10):
        put(stored, f"private{i}", "other")
    stored.put("checkpoints", path("s0x", "a"), fields())
    run = ["tinker://s0:train:0/"]
    assert list(stored.readable_checkpoints(run, {"me", "you"})) == [
        {own: dict(fields()), public: {**fields("other"), "public": "true"}}
    ]
    assert [found.keys() for found in stored.readable_checkpoints(run, set())] == [{public}]
    assert list(stored.readable_checkpoints(["tinker://never:train:0/"], {"me"})) == [{}]


def test_the_checkpoints_of_long_runs_are_read_in_slices_that_share_a_round_trip(
    client: redis.Redis, stored: RedisRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many checkpoints in one script would keep the server from other clients for long."""
    monkeypatch.setattr(records, "_SLICE", 4)
    runs = {f"tinker://s{run}:train:0/": {path(f"s{run}", name) for name in range(5 * run)} for run in range(3)}
    for name in sorted(name for names in runs.values() for name in names):
        stored.put("checkpoints", name, fields())
    others = [path("s2", f"{name}theirs") for name in range(9)]
    for name in others:
        stored.put("checkpoints", name, fields("other"))
    assert list(stored.size_of_checkpoints(list(runs), {"me"})) == [(0, 0), (5, 50), (10, 100)]
    assert len(list(stored.readable_checkpoints(list(runs), {"me"}))) == 3, "the server knows the script"
    client.config_resetstat()
    assert [found.keys() for found in stored.readable_checkpoints(list(runs), {"me"})] == list(runs.values())
    read = client.info("commandstats")
    assert read["cmdstat_hmget"]["calls"] == 5 + 10 + 9
    assert read["cmdstat_evalsha"]["calls"] >= (5 + 10 + 9) / 4, "no script reads more than a slice"


def test_of_a_long_run_only_the_newest_of_each_kind_that_can_be_read_are_read_whole(
    client: redis.Redis, stored: RedisRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_SLICE", 10)
    now = stored.now()
    for name in range(25):
        kind = ("weights", "sampler_weights")[name % 2]
        made = Checkpoint("me", "s0:train:0", kind, "base", "models/x", float(100 - name), 10, {}, [])
        made = replace(made, expires_at={0: now - 1, 1: now + 60}.get(name), owner="other" if name == 2 else "me")
        stored.put("checkpoints", f"tinker://s0:train:0/{kind}/{name:03}", dump(made))
    run, newest = ["tinker://s0:train:0/"], lambda kind, name: f"tinker://s0:train:0/{kind}/{name:03}"
    client.config_resetstat()
    (found,) = stored.readable_checkpoints(run, {"me"}, newest=True)
    assert client.info("commandstats")["cmdstat_hgetall"]["calls"] == len(found) <= 2 * 3, "two kinds, three slices"
    (every,) = stored.readable_checkpoints(run, {"me"})
    assert found.items() <= every.items()
    assert {newest("weights", 4), newest("sampler_weights", 1)} <= found.keys()
    assert newest("weights", 0) not in found, "it has expired"
    assert newest("weights", 2) not in found, "it is another project's"
