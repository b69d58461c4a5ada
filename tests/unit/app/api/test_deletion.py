"""A deleted checkpoint is gone with its files, and never comes back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest

from app import ids
from app.domain import ops
from app.domain.records import Checkpoint
from app.errors import NewerContent, Unavailable
from app.services.tenants.access import Sources
from app.stores.objects.folder import FolderStore
from app.stores.redis import keys
from app.stores.redis.client import connect
from app.stores.redis.lifecycle import Pins
from app.stores.redis.types import Lease
from tests.pages import in_mid_hour, listed
from tests.unit.app.api.test_copies import FILES, contents_at, delete, rebuilt, saved
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.conftest import Api


def test_a_deleted_checkpoint_is_gone_with_its_files(api: Api) -> None:
    model = api.model()
    api.services.objects.put_new("checkpoints/x/adapter_config.json", b"{}")
    api.services.objects.put_new("checkpoints/xy/other", b"{}")
    save_checkpoint(api, model)
    url = f"/api/v1/training_runs/{model}/checkpoints/weights/a"
    assert api.client.delete(url, headers={"X-API-Key": api.key}).status_code == 200
    assert api.client.delete(url, headers={"X-API-Key": api.key}).status_code == 404
    assert api.services.objects.list("checkpoints/") == ["checkpoints/xy/other"]


def test_no_overwritten_save_of_a_deleted_checkpoint_comes_back_into_an_emptied_state_server(
    api: Api, state_url: str
) -> None:
    path = saved(api)
    run = ids.TinkerPath.parse(path).model_id
    for seq in (2, 3):
        saved(api, run, seq)
    delete(api, path)
    older = {key.split("/")[-2] for key in api.services.objects.list(f"models/{run}/weights/a/")}
    assert older == {"1-1", "2-1"}, "a call that loads an older save still finds it"
    assert path not in rebuilt(api, state_url, emptied=True).checkpoints
    saved(api, run, 4)
    assert path in rebuilt(api, state_url, emptied=True).checkpoints


def test_files_that_a_run_loads_outlive_their_checkpoint_as_long_as_it_may_be_replayed(
    api: Api, state_url: str
) -> None:
    path = saved(api)
    run = ids.TinkerPath.parse(path).model_id
    saved(api, run, 2)
    body = {"session_id": api.session(), "model_seq_id": 0, "path": path}
    loaded = api.post("load_weights", body).json["request_id"].rpartition(":")[0]
    api.commit(loaded, 0)
    delete(api, path)
    assert api.get("checkpoints").json["checkpoints"] == []
    assert contents_at(api, f"models/{run}/weights/a/2-1") == FILES
    assert path not in rebuilt(api, state_url, emptied=True).checkpoints


def test_files_that_a_run_no_longer_loads_go_with_their_checkpoint(api: Api) -> None:
    path = saved(api)
    body = {"session_id": api.session(), "model_seq_id": 0, "path": path}
    loaded = api.post("load_weights", body).json["request_id"].rpartition(":")[0]
    api.commit(loaded, 0)
    lease = api.services.oplog.acquire(loaded, "node/test")
    assert isinstance(lease, Lease)
    api.services.oplog.set_snapshot(lease, 0, "the newest")
    delete(api, path)
    assert api.services.objects.list(f"models/{ids.TinkerPath.parse(path).model_id}/") == []


def test_files_that_a_call_may_load_which_cannot_be_read_outlive_their_checkpoint(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(api)
    api.post("load_weights", {"session_id": api.session(), "model_seq_id": 0, "path": path})
    monkeypatch.setattr(ops, "decode", mock.Mock(side_effect=NewerContent("written by a newer version")))
    delete(api, path)
    assert api.get("checkpoints").json["checkpoints"] == []
    run = ids.TinkerPath.parse(path).model_id
    assert contents_at(api, f"models/{run}/weights/a/1-1") == FILES


def test_a_deletion_stores_a_bounded_number_of_notes(api: Api, state_url: str) -> None:
    path = saved(api)
    run = ids.TinkerPath.parse(path).model_id
    for seq in range(2, 31):
        saved(api, run, seq)
    delete(api, path)
    notes = [key for key in api.services.objects.list(f"models/{run}/weights/a/") if "/expiry-" in key]
    assert {key.split("/")[-2] for key in notes} == {f"{seq}-1" for seq in range(20, 30)}
    assert path not in rebuilt(api, state_url, emptied=True).checkpoints


def test_a_deletion_on_a_full_disk_frees_the_checkpoints_files(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(api)
    run = ids.TinkerPath.parse(path).model_id
    saved(api, run, 2)

    def full(*_: object) -> bool:
        raise Unavailable("the disk is full")

    monkeypatch.setattr(type(api.services.objects), "put_new", full)
    delete(api, path)
    assert api.get("checkpoints").json["checkpoints"] == []
    assert {key.split("/")[-2] for key in api.services.objects.list(f"models/{run}/weights/a/")} == {"1-1"}


def test_a_deletion_that_the_object_store_broke_off_is_ended_by_a_repeat_and_no_rebuild_restores_it(
    api: Api, state_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_mid_hour()
    path = saved(api)
    run = ids.TinkerPath.parse(path).model_id
    store = type(api.services.objects)
    works, kept = store.delete, f"models/{run}/weights/a/1-1/adapter_model.safetensors"

    def breaks_off(self: FolderStore, keys: Iterable[str]) -> None:
        works(self, [key for key in keys if key != kept])
        raise Unavailable("the object store is away")

    url = f"/api/v1/training_runs/{run}/checkpoints/weights/a"
    monkeypatch.setattr(store, "delete", breaks_off)
    assert api.client.delete(url, headers={"X-API-Key": api.key}).status_code == 503
    assert [one["tinker_path"] for one in api.get("checkpoints").json["checkpoints"]] == [path]
    monkeypatch.setattr(store, "delete", works)
    delete(api, path)
    with connect(state_url) as client:
        entries = [entry for page in listed(client) for entry in client.hvals(keys.page(page))]
    assert sum(b"checkpoint_delete" in entry for entry in entries) == 1, "both calls are one deletion"
    assert (api.get("checkpoints").json["checkpoints"], api.services.objects.list(f"models/{run}/weights/")) == ([], [])
    assert path not in rebuilt(api, state_url, emptied=True).checkpoints


def test_a_deletion_leaves_the_save_that_replaces_its_checkpoint_meanwhile(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(api)
    run = ids.TinkerPath.parse(path).model_id
    store = type(api.services.objects)
    works = store.delete

    def replaced_behind(self: FolderStore, keys: Iterable[str]) -> None:
        works(self, keys)
        saved(api, run, 2)

    monkeypatch.setattr(store, "delete", replaced_behind)
    delete(api, path)
    assert [one["tinker_path"] for one in api.get("checkpoints").json["checkpoints"]] == [path]
    left = {key.split("/")[-2] for key in api.services.objects.list(f"models/{run}/weights/a/")}
    assert left == {"2-1"}


def load_into(api: Api, run: str, path: str) -> int:
    return api.post("load_weights", {"model_id": run, "seq_id": 1, "path": path}).status_code


def test_a_deletion_that_looks_for_loads_admits_no_further_one(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that runs before its files go, and whose trainer dies then, could never be replayed."""
    path, run, looked = saved(api), api.model(), Pins.may_have
    statuses = []

    def loaded_behind(self: Pins, checkpoint: Checkpoint) -> bool:
        found = looked(self, checkpoint)
        statuses.append(load_into(api, run, path))
        return found

    monkeypatch.setattr(Pins, "may_have", loaded_behind)
    delete(api, path)
    assert (statuses, api.services.oplog.entry(run, 1)) == ([503], None)
    assert api.services.objects.list(f"models/{ids.TinkerPath.parse(path).model_id}/") == []
    assert load_into(api, run, path) == 400, "there is no such checkpoint"


@pytest.mark.parametrize(("change", "repeated"), [("deleted", 400), ("overwritten", 200), ("deleted, saved anew", 200)])
def test_a_load_finds_its_checkpoint_deleted_or_overwritten_since_it_was_read(
    api: Api, monkeypatch: pytest.MonkeyPatch, change: str, repeated: int
) -> None:
    path, run, found = saved(api), api.model(), Sources.find
    saver = ids.TinkerPath.parse(path).model_id

    def changed_behind(self: Sources, *asked: Any) -> Checkpoint:
        checkpoint = found(self, *asked)
        monkeypatch.setattr(Sources, "find", found)
        if "deleted" in change:
            delete(api, path)
        if change != "deleted":
            saved(api, saver, 2)
        return checkpoint

    monkeypatch.setattr(Sources, "find", changed_behind)
    assert load_into(api, run, path) == 503
    assert api.services.oplog.entry(run, 1) is None
    assert load_into(api, run, path) == repeated
