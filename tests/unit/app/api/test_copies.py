"""A copied checkpoint has its own files, in its own run, which cannot be trained on."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any
from unittest import mock

import pytest
from werkzeug.test import TestResponse

from app import ids
from app.domain.checkpoints import FileEntry, Manifest
from app.domain.limits import Limits
from app.domain.ops import LoraSpec
from app.domain.records import Checkpoint
from app.errors import Unavailable
from app.services.recovery.rebuild import Rebuild, Restored
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.client import connect
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import load
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.conftest import BASE, KEY, OTHER_KEY, Api, batch

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"tensors"}


def saved(api: Api, run: str = "", seq: int = 1, data: dict[str, bytes] = FILES, **changes: Any) -> str:
    """A checkpoint with its files present. A later `seq` of the same run overwrites it."""
    run = run or api.model(user_metadata={"renderer_name": "qwen3"})
    prefix = f"models/{run}/weights/a/{seq}-1"
    size = sum(map(len, data.values()))
    record = {"prefix": prefix, "files": sorted(data), "size_bytes": size, "user_metadata": {"step": "7"}}
    path = save_checkpoint(api, run, **record, **changes)
    for name, content in data.items():
        api.services.objects.put_new(f"{prefix}/{name}", content)
    files = {name: FileEntry(len(content), "0") for name, content in data.items()}
    owner = project(api)
    manifest = Manifest(
        path, f"{seq}-1", run, owner, BASE, LoraSpec(4), seq, 1, "2026-01-01T00:00:00+00:00", files, 1, "cpu",
        user_metadata={"step": "7"}, expires_at=changes.get("expires_at"),
    )  # fmt: skip
    api.services.objects.put_new(f"{prefix}/manifest.json", manifest.to_json())
    return path


def project(api: Api) -> str:
    session = api.session()
    owner = api.services.records.get("sessions", session)["owner"].strip('"')
    api.services.records.delete("sessions", session)
    return owner


def copy(api: Api, path: str, key: str = "", **asked: Any) -> TestResponse:
    body = {"source_path": path, **(asked or {"destination_project_id": project(api)})}
    headers = {"X-API-Key": api.key, "X-Idempotency-Key": key or str(uuid.uuid4())}
    return api.client.post("/api/v1/copy_weights", json=body, headers=headers)


def contents(api: Api, path: str) -> dict[str, bytes]:
    record = api.services.records.get("checkpoints", path)
    return contents_at(api, record["prefix"].strip('"'))


def contents_at(api: Api, prefix: str) -> dict[str, bytes]:
    return {name: api.services.objects.read(f"{prefix}/{name}") for name in FILES}


def rebuilt(api: Api, state_url: str, *, emptied: bool = False) -> Restored:
    services = api.services
    with connect(state_url) as client:
        if emptied:
            client.flushall()
        lifecycle = RedisLifecycle(client, services.settings.engine)
        return Rebuild(services.oplog, lifecycle, services.records, services.objects)()


def delete(api: Api, path: str) -> None:
    url = f"/api/v1/training_runs/{path.removeprefix('tinker://').replace('/', '/checkpoints/', 1)}"
    assert api.client.delete(url, headers={"X-API-Key": api.key}).status_code == 200


def test_a_copy_is_a_checkpoint_like_its_source_in_a_run_of_its_own(api: Api) -> None:
    source = saved(api, expires_at=9e9)
    path = copy(api, source).json["tinker_path"]
    assert path != source
    assert (ids.TinkerPath.parse(path).kind, ids.TinkerPath.parse(path).name) == ("weights", "a")
    assert contents(api, path) == FILES
    run = ids.TinkerPath.parse(path).model_id
    described = api.get(f"training_runs/{run}").json
    assert (described["base_model"], described["lora_rank"], described["ended"]) == (BASE, 4, True)
    assert described["user_metadata"] == {"renderer_name": "qwen3"}
    [listed] = api.get(f"training_runs/{run}/checkpoints").json["checkpoints"]
    assert (listed["tinker_path"], listed["user_metadata"], listed["public"]) == (path, {"step": "7"}, False)
    assert "expires_at" not in listed, "its source's end is not its own"


@pytest.mark.parametrize("gone", ["source", "copy"])
def test_each_outlives_the_other(api: Api, gone: str) -> None:
    source = saved(api)
    path = copy(api, source).json["tinker_path"]
    delete(api, source if gone == "source" else path)
    left = path if gone == "source" else source
    assert contents(api, left) == FILES
    body = {"session_id": api.session(), "model_seq_id": 0, "path": left}
    assert api.post("load_weights", body).status_code == 200


def test_a_retried_copy_is_the_same_one_and_another_is_another(api: Api) -> None:
    source = saved(api)
    first, again, other = (copy(api, source, key).json["tinker_path"] for key in ("a", "a", "b"))
    assert first == again
    assert first != other
    assert len(api.get("checkpoints").json["checkpoints"]) == 3


def test_a_key_that_was_used_for_another_checkpoint_is_refused(api: Api) -> None:
    assert copy(api, saved(api), "used").status_code == 200
    answer = copy(api, saved(api), "used")
    assert (answer.status_code, "already holds the copy of another checkpoint" in answer.json["detail"]) == (400, True)


def test_a_copy_that_broke_off_is_not_there_and_is_made_whole_by_the_next_try(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(api)
    store = type(api.services.objects)
    works = store.put_new

    def away(*_: object) -> bool:
        raise Unavailable("the object store is away")

    monkeypatch.setattr(store, "put_new", away)
    assert copy(api, source, "broken").status_code == 503
    assert len(api.get("checkpoints").json["checkpoints"]) == 1
    monkeypatch.setattr(store, "put_new", works)
    assert contents(api, copy(api, source, "broken").json["tinker_path"]) == FILES


def broken_off(api: Api, source: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that broke off after its first file."""
    store, copied = type(api.services.objects), []
    works = store.copy

    def away_at_the_second(*asked: Any) -> None:
        copied.append(asked)
        if len(copied) == 2:
            raise Unavailable("the object store is away")
        works(*asked)

    monkeypatch.setattr(store, "copy", away_at_the_second)
    assert copy(api, source, key).status_code == 503


def test_a_copy_that_broke_off_and_is_repeated_a_day_later_keeps_its_files_from_the_sweep(
    api: Api, state_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, of = saved(api), project(api)
    broken_off(api, source, "late", monkeypatch)
    prefix = f"models/{ids.model_id(ids.copy_session_id(of, 'late'), 0)}/weights/a/1-1"
    with connect(state_url) as client:
        lifecycle = RedisLifecycle(client, EngineSettings(orphan_s=1e-3))
        client.zadd(keys.ORPHANS, {prefix: 1})
        with lifecycle.removing(prefix) as may_remove:
            assert may_remove
            answer = copy(api, source, "late")
            assert (answer.status_code, "are being removed" in answer.json["detail"]) == (503, True)
        client.zadd(keys.ORPHANS, {prefix: 1})
        path = copy(api, source, "late").json["tinker_path"]
        with lifecycle.removing(prefix) as may_remove:
            assert not may_remove
    assert contents(api, path) == FILES


def test_the_session_of_a_copy_that_was_killed_has_ended_after_the_repeat(
    api: Api, state_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    source, of, works = saved(api), project(api), RedisLifecycle.finish
    monkeypatch.setattr(RedisLifecycle, "finish", mock.Mock(side_effect=Killed))
    with pytest.raises(Killed):
        copy(api, source, "killed")
    monkeypatch.setattr(RedisLifecycle, "finish", works)
    assert copy(api, source, "killed").status_code == 200
    session = ids.copy_session_id(of, "killed")
    assert api.services.records.get("sessions", session)["status"] == '"success"'
    with connect(state_url) as client:
        assert not RedisLifecycle(client, EngineSettings()).heard([session])


NEWER = {name: b"newer " + data for name, data in FILES.items()}


def overwritten(api: Api, path: str) -> None:
    assert saved(api, ids.TinkerPath.parse(path).model_id, 2, NEWER) == path


def test_a_copy_that_broke_off_has_no_file_of_a_source_that_was_overwritten_since(
    api: Api, state_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, of = saved(api), project(api)
    broken_off(api, source, "overwritten", monkeypatch)
    overwritten(api, source)
    for _ in range(2):
        answer = copy(api, source, "overwritten")
        assert (answer.status_code, "under a new idempotency key" in answer.json["detail"]) == (400, True)
    path = copy(api, source, "new").json["tinker_path"]
    assert contents(api, path) == NEWER
    assert {one["tinker_path"] for one in api.get("checkpoints").json["checkpoints"]} == {source, path}
    run = ids.TinkerPath.parse(path).model_id
    assert run not in rebuilt(api, state_url).set_back, "the copy's run has no later history"
    restored = rebuilt(api, state_url, emptied=True).checkpoints
    broken = f"tinker://{ids.model_id(ids.copy_session_id(of, 'overwritten'), 0)}/weights/a"
    assert (restored.count(path), restored.count(broken)) == (1, 0)
    assert contents(api, path) == NEWER


def test_a_repeat_of_a_whole_copy_finds_it_after_its_source_was_overwritten(api: Api) -> None:
    source = saved(api)
    path = copy(api, source, "whole").json["tinker_path"]
    overwritten(api, source)
    assert copy(api, source, "whole").json == {"tinker_path": path}
    assert contents(api, path) == FILES


@pytest.mark.parametrize("into", ["project", "session"])
def test_a_repeat_of_a_whole_copy_finds_it_after_its_source_is_gone(api: Api, into: str) -> None:
    source, session = saved(api), api.session()
    place = {"session_id": session, "model_seq_id": 0} if into == "session" else {}
    path = copy(api, source, "whole", **place).json["tinker_path"]
    delete(api, source)
    assert copy(api, source, "whole", **place).json == {"tinker_path": path}
    other = saved(api)
    delete(api, other)
    assert copy(api, other, "whole", **place).status_code == 404, "this call made no copy"


def test_a_copy_made_anew_where_one_was_deleted_that_a_run_loads_is_whole_and_private(api: Api, state_url: str) -> None:
    source, target = saved(api), {"destination_project_id": project(api)}
    path = copy(api, source, "once", **target).json["tinker_path"]
    api.post("load_weights", {"session_id": api.session(), "model_seq_id": 0, "path": path})
    run, _, name = path.removeprefix("tinker://").partition("/")
    publish = f"/api/v1/training_runs/{run}/checkpoints/{name}/publish"
    assert api.client.post(publish, headers={"X-API-Key": api.key}).status_code == 200
    delete(api, path)
    assert copy(api, source, "once", **target).json["tinker_path"] == path
    assert contents(api, path) == FILES
    assert path in rebuilt(api, state_url, emptied=True).checkpoints
    assert load(Checkpoint, api.services.records.get("checkpoints", path)).public is False


def test_a_copy_of_nothing_leaves_no_session(api: Api) -> None:
    source = saved(api)
    delete(api, source)
    before = api.get("sessions").json["sessions"]
    assert copy(api, source, "nothing").status_code == 404
    assert api.get("sessions").json["sessions"] == before


def test_a_copy_that_broke_off_in_an_earlier_version_is_made_whole(
    api: Api, state_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(api)
    broken_off(api, source, "earlier", monkeypatch)
    with connect(state_url) as client:
        for key in client.scan_iter("*models*"):
            if client.type(key) == b"hash":
                client.hdel(key, "copied_prefix")
    path = copy(api, source, "earlier").json["tinker_path"]
    assert contents(api, path) == FILES


def test_a_copy_cannot_be_trained_on(api: Api) -> None:
    run = ids.TinkerPath.parse(copy(api, saved(api)).json["tinker_path"]).model_id
    answer = api.forward_backward(batch(run, 2))
    assert (answer.status_code, "create a new model" in answer.json["detail"]) == (410, True)


def test_a_copy_lives_as_long_as_was_asked(api: Api) -> None:
    source = saved(api)
    asked = {"destination_project_id": project(api), "ttl_seconds": 7200}
    path = copy(api, source, **asked).json["tinker_path"]
    [listed] = [one for one in api.get("checkpoints").json["checkpoints"] if one["tinker_path"] == path]
    lives = datetime.fromisoformat(listed["expires_at"]) - datetime.fromisoformat(listed["time"])
    assert 7199 < lives.total_seconds() < 7201
    assert copy(api, source, **{**asked, "ttl_seconds": 5}).status_code == 400


def test_a_copy_without_a_ttl_has_that_of_its_project(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = api.services.quotas._limits
    source, of = saved(api), project(api)
    monkeypatch.setitem(limits._found, ("projects", of), (float("inf"), Limits(checkpoint_ttl_s=7200)))
    found = []
    for ttl in ({}, {"ttl_seconds": 3600}):
        path = copy(api, source, **ttl, destination_project_id=of).json["tinker_path"]
        checkpoint = api.services.records.find(Checkpoint, path)
        assert checkpoint is not None and checkpoint.expires_at is not None
        found.append((round(checkpoint.expires_at - checkpoint.created), checkpoint.counts))
    assert found == [(7200, True), (3600, False)]


def test_a_copy_can_be_a_run_of_a_session(api: Api) -> None:
    source, session = saved(api), api.session()
    answers = [copy(api, source, key, session_id=session, model_seq_id=4) for key in ("a", "b")]
    assert [answer.json["tinker_path"] for answer in answers] == [f"tinker://{session}:train:4/weights/a"] * 2
    taken = api.model(session)
    save_checkpoint(api, taken)
    answer = copy(api, source, session_id=session, model_seq_id=0)
    assert (answer.status_code, taken in answer.json["detail"]) == (400, True)


def test_a_public_checkpoint_is_copied_by_a_stranger_and_a_private_one_looks_missing(api: Api, stranger: Api) -> None:
    source = saved(api)
    refused = copy(stranger, source)
    assert refused.status_code == 404
    api.services.records.update("checkpoints", source, {"public": "true"})
    path = copy(stranger, source).json["tinker_path"]
    assert contents(stranger, path) == FILES
    described = stranger.get(f"training_runs/{ids.TinkerPath.parse(path).model_id}").json
    assert described["user_metadata"] == {}, "the metadata of the run was not published"
    assert [one["tinker_path"] for one in stranger.get("checkpoints").json["checkpoints"]] == [path]
    assert api.post("weights_info", {"tinker_path": path}).status_code == 404, "the copy is not public"
    api.services.records.delete("checkpoints", source)
    assert copy(api, source).data == refused.data


@pytest.mark.parametrize("key", [KEY, OTHER_KEY])
def test_nothing_is_copied_to_where_one_may_not_write(api: Api, stranger: Api, key: str) -> None:
    source = saved(api)
    elsewhere = project(stranger) if key == KEY else "no-such-project"
    answer = copy(api, source, destination_project_id=elsewhere)
    assert (answer.status_code, answer.json["detail"]) == (404, f"project {elsewhere!r} does not exist")
    assert copy(api, source, session_id=stranger.session(), model_seq_id=0).status_code == 404


BAD_PLACES: list[dict[str, Any]] = [
    {"ttl_seconds": 7200},
    {"session_id": "x"},
    {"model_seq_id": 1},
    {"session_id": "x", "destination_project_id": "y"},
]


@pytest.mark.parametrize("asked", BAD_PLACES)
def test_a_copy_to_nowhere_or_to_two_places_is_refused(api: Api, asked: dict[str, Any]) -> None:
    answer = copy(api, saved(api), **asked)
    assert (answer.status_code, "destination_project_id" in answer.json["detail"]) == (400, True)


def test_a_copy_comes_back_into_an_emptied_state_server(api: Api, state_url: str) -> None:
    path = copy(api, saved(api)).json["tinker_path"]
    before = api.get("checkpoints").json["checkpoints"]
    assert path in rebuilt(api, state_url, emptied=True).checkpoints
    after = api.get("checkpoints").json["checkpoints"]
    assert [one for one in after if one["tinker_path"] == path] == [one for one in before if one["tinker_path"] == path]
