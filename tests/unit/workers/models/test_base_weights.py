"""A worker serves a base model with the weights that its runs depend on, and refuses others."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import redis

from app.errors import SetupError, UnservableModel
from app.settings import BaseModelSettings
from app.stores.redis.client import connect
from app.stores.redis.records import RedisRecords
from tests.models import tiny_qwen3
from tests.servers import free_port, start_valkey
from workers.models.loading import base_weights
from workers.models.loading.weights_id import weights_id
from workers.process import assembly


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("other"), seed=1)


def start(client: redis.Redis, path: Path, weights: str = "", name: str = "o/base") -> bool:
    """Starts a worker with these weights. Returns True, or raises what it refuses with."""
    with base_weights.checked(RedisRecords(client), BaseModelSettings(name=name, path=str(path), weights_id=weights)):
        return True


def noted(client: redis.Redis) -> dict[bytes, bytes]:
    return client.hgetall("tinsmith:base_weights")


def test_the_weights_of_the_first_start_are_noted_and_others_refused_until_they_are_back(client, first, other, caplog):
    caplog.set_level("INFO", "workers.models.loading.base_weights")
    here, there = weights_id(str(first)), weights_id(str(other))
    assert start(client, first) and start(client, first)
    assert caplog.messages == [f"the weights of base model o/base have the id {here}"] * 2
    said = (
        f"'o/base' was served here with other weights before .id {here}; those of its path have the id {there}.*"
        f'runs and checkpoints may depend.*set path to a folder.*another name.*set weights_id = "{there}"'
    )
    with pytest.raises(UnservableModel, match=said):
        start(client, other)
    assert noted(client) == {b"o/base": here.encode()}
    assert start(client, first) and start(client, other, name="o/other")


def test_other_weights_in_a_folder_are_refused_before_they_are_loaded(client, first, other):
    """Loading them takes minutes."""
    assert start(client, first)
    base = BaseModelSettings(name="o/base", path=str(other))
    with pytest.raises(UnservableModel, match="other weights"), base_weights.checked(RedisRecords(client), base):
        pytest.fail("they were loaded")


def test_the_id_of_other_weights_in_the_settings_makes_them_those_of_the_base_model(client, first, other):
    here, there = weights_id(str(first)), weights_id(str(other))
    assert start(client, first) and start(client, other, weights=there) and start(client, other)
    assert noted(client) == {b"o/base": there.encode()}
    with pytest.raises(UnservableModel, match=f"id {there}; those of its path have the id {here}"):
        start(client, first)


def test_weights_without_the_id_of_the_settings_are_refused_and_not_noted(client, first, other):
    here, there = weights_id(str(first)), weights_id(str(other))
    with pytest.raises(UnservableModel, match=f"weights_id is {there}, but the weights of its path have the id {here}"):
        start(client, first, weights=there)
    assert noted(client) == {}


def test_weights_in_other_files_than_safetensors_are_not_checked_but_are_not_those_of_an_id(client, tmp_path, caplog):
    with pytest.raises(UnservableModel, match=r"weights_id is 0+, but the weights of its path .*have no id"):
        start(client, tmp_path, weights="0" * 16)
    assert start(client, tmp_path)
    assert "o/base are not checked" in caplog.text
    assert noted(client) == {}


def test_weights_that_cannot_be_loaded_leave_no_note(client, first, other):
    """So another path can follow the first one that a name was given by mistake."""
    base = BaseModelSettings(name="o/base", path=str(first))
    with pytest.raises(SetupError), base_weights.checked(RedisRecords(client), base):
        raise SetupError("a format that is not read")
    assert start(client, other)


def test_those_of_a_hub_id_are_checked_once_they_are_loaded(client, first, other, monkeypatch):
    monkeypatch.setattr(base_weights, "weights_id", lambda _: weights_id(str(other)))
    start(client, first, name="o/base")
    monkeypatch.setattr(base_weights, "weights_id", lambda _: weights_id(str(first)))
    base, loaded = BaseModelSettings(name="o/base", path="org/hub-id"), []
    with pytest.raises(UnservableModel), base_weights.checked(RedisRecords(client), base):
        loaded.append(True)
    assert loaded


def test_a_worker_waits_for_a_state_server_that_is_away(first, tmp_path, monkeypatch):
    port, asked = free_port(), threading.Event()
    monkeypatch.setattr(base_weights, "_AGAIN_S", 0.05)
    monkeypatch.setattr(base_weights.log, "warning", lambda *_: asked.set())
    starting = threading.Thread(target=start, args=(connect(f"redis://127.0.0.1:{port}/0"), first))
    starting.start()
    assert asked.wait(60)
    with start_valkey(tmp_path / "late", port) as url, connect(url) as client:
        starting.join()
        assert noted(client) == {b"o/base": weights_id(str(first)).encode()}


@pytest.mark.parametrize("name", ["model", "revision", "download_dir"])
def test_a_sampler_that_reads_files_of_its_own_is_not_compared(name):
    base = BaseModelSettings(name="o/base", path="o/base", sampler={"engine_args": {name: "other"}})
    assert assembly._has_own_weights(base)
    assert not assembly._has_own_weights(BaseModelSettings(name="o/base", path="o/base"))
