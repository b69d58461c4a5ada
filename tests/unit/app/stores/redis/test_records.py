"""Small records, and very long lists of them."""

from __future__ import annotations

import time

import pytest
import redis

from app.domain.accounts import Key, User
from app.domain.records import Model
from app.stores.redis import records
from app.stores.redis.records import RedisRecords, dump


@pytest.fixture
def stored(client: redis.Redis) -> RedisRecords:
    return RedisRecords(client)


def test_a_list_holds_each_record_once_in_order_however_many_slices_it_takes(stored, monkeypatch):
    monkeypatch.setattr(records, "_SLICE", 3)
    for i in range(10):
        stored.put("things", f"id-{9 - i}", {"n": str(i)})
    assert list(stored.list("things")) == [(f"id-{i}", {"n": str(9 - i)}) for i in range(10)]


def test_a_list_by_prefix_has_no_other(stored):
    ids = ("a:1", "a:10", "a:2", "ab:1", "a", "b:1", "\u00fc:1")
    for id_ in ids:
        stored.put("things", id_, {"x": "y"})
    assert [id_ for id_, _ in stored.list("things", "a:")] == ["a:1", "a:10", "a:2"]
    assert [id_ for id_, _ in stored.list("things", "\u00fc")] == ["\u00fc:1"]
    assert {id_ for id_, _ in stored.list("things")} == set(ids)
    assert list(stored.list("things", "c")) == []


def test_a_record_is_found_as_it_was_stored_also_beside_the_fields_of_a_journal(stored, client):
    run = Model("me", "s", "base", 1.5, "ready", {"rank": 8}, {"name": '\u00fc, "]', "no": None}, full=True)
    stored.put("models", "a", dump(run))
    client.hset("tinsmith:models:a", mapping={"applied": "3", "worker": "no JSON"})
    assert stored.find(Model, "a") == run
    assert stored.find(Model, "b") is None


def test_a_field_that_an_earlier_version_did_not_write_has_its_default(stored, client):
    stored.put("models", "a", dump(Model("me", "s", "base", 1.5, key="k")))
    client.hdel("tinsmith:models:a", "key", "full", "user_metadata")
    assert stored.find(Model, "a") == Model("me", "s", "base", 1.5)


def test_a_key_is_found_with_its_user_and_without_a_user_that_is_gone(stored, client):
    user = User("u", "org", "a@example.org", 1.0, {"p": "member"})
    key = Key("k", "u", "p", "digest", ["train"], "name", "", 2.0)
    stored.put("keys", "k", dump(key))
    assert stored.find_key("k") == (key, None)
    stored.put("users", "u", dump(user))
    assert stored.find_key("k") == (key, user)
    assert stored.find_key("u") is None


def test_what_expired_is_not_listed_and_leaves_the_index(stored, client):
    stored.put("things", "short", {"x": "y"}, ttl_s=0.001)
    stored.put("things", "long", {"x": "y"})
    time.sleep(0.01)
    assert [id_ for id_, _ in stored.list("things")] == ["long"]
    assert client.zcard("tinsmith:index:things") == 1


def test_a_record_that_is_deleted_and_made_again_while_a_list_reads_it_stays_in_the_index(stored, monkeypatch):
    stored.put("things", "a", {"x": "y"})
    read = stored.read

    def read_between_the_two(namespace, ids):
        stored.delete(namespace, "a")
        found = list(read(namespace, ids))
        stored.put(namespace, "a", {"x": "z"})
        return found

    with monkeypatch.context() as patch:
        patch.setattr(stored, "read", read_between_the_two)
        assert list(stored.list("things")) == []
    assert list(stored.list("things")) == [("a", {"x": "z"})]


def test_a_list_goes_on_while_records_come_and_go(stored, monkeypatch):
    monkeypatch.setattr(records, "_SLICE", 2)
    for i in range(6):
        stored.put("things", str(i), {"x": "y"})
    seen = []
    for id_, _ in stored.list("things"):
        seen.append(id_)
        stored.delete("things", id_)
    assert seen == [str(i) for i in range(6)]


def test_now_is_the_servers_clock(stored, client, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert abs(stored.now() - client.time()[0]) < 60


def test_a_record_that_changed_since_it_was_read_is_not_deleted(stored, client):
    stored.put("things", "a", {"x": "1", "y": "2"})
    read = stored.get("things", "a")
    stored.update("things", "a", {"x": "3"})
    assert not stored.delete_same("things", "a", read)
    assert stored.get("things", "a") == {"x": "3", "y": "2"}
    assert stored.delete_same("things", "a", {"x": "3", "y": "2"})
    assert stored.get("things", "a") is None
    assert client.zcard("tinsmith:index:things") == 0


def test_a_record_that_changed_since_it_was_read_is_not_updated(stored):
    stored.put("things", "a", {"x": "1", "y": "2"})
    assert not stored.update_same("things", "a", ("x", "3"), {"y": "4"})
    assert not stored.update_same("things", "b", ("x", "1"), {"y": "4"})
    assert (stored.get("things", "a"), stored.get("things", "b")) == ({"x": "1", "y": "2"}, None)
    assert stored.update_same("things", "a", ("x", "1"), {"y": "4"})
    assert stored.get("things", "a") == {"x": "1", "y": "4"}


def test_older_checkpoints_are_deleted_with_an_audit_entry_unless_one_has_changed(stored, client):
    fields = {"owner": '"me"', "prefix": '"p"', "size_bytes": "1", "public": "false"}
    for path in ("old", "new"):
        stored.put("checkpoints", path, {**fields, "prefix": f'"{path}"'})
    asked = "me", [("new", stored.get("checkpoints", "new"))], [("old", stored.get("checkpoints", "old"))]
    for path, change in (("new", "public"), ("old", "expires_at")):
        stored.update("checkpoints", path, {change: "true"})
        assert not stored.delete_older(*asked, {"old": "text"})
        stored.update("checkpoints", path, {change: fields.get(change, "")})
    assert stored.get("checkpoints", "old") and not client.keys("tinsmith:page:*")
    assert stored.delete_older(*asked, {"old": "text"})
    assert not stored.delete_older(*asked, {"old": "text"}), "a repeat finds it gone"
    assert [path for path, _ in stored.list("checkpoints")] == ["new"]
    (page,) = client.keys("tinsmith:page:audit/me/*")
    assert [text.split(b" ", 1)[1] for text in client.hvals(page)] == [b"text"]


def test_the_first_id_of_a_base_models_weights_stays_until_another_replaces_it_on_purpose(stored):
    assert [stored.note_weights("base", id_) for id_ in ("a", "b")] == ["", "a"]
    assert stored.note_weights("other", "b") == ""
    assert stored.note_weights("base", "b", replace=True) == "a"
    assert stored.note_weights("base", "a") == "b"
