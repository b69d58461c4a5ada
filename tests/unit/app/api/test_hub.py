"""A base model's tokenizer is public, as on Hugging Face's Hub. No other file of its folder is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from app.api.base import EXTENSION
from app.services.base_models import BaseModels
from app.services.hub import HubService
from app.settings import ApiSettings, BaseModelSettings, Settings
from app.stores.hub_cache import HubCache
from tests.hub_of_models import hub_of_models, use_hub
from tests.tokenizers import byte_tokenizer
from tests.unit.app.conftest import BASE, Api

Serve = Callable[..., FlaskClient]
_TOKENIZER = {"config.json", "tokenizer.json", "tokenizer_config.json", "additional_chat_templates/brief.jinja"}
SERVED = _TOKENIZER | {"preprocessor_config.json"}
HIDDEN = ("model.safetensors", "notes.txt", ".env", "additional_chat_templates/secret.txt", "private/tokenizer.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with more files in and around it than the tokenizer's."""
    folder = byte_tokenizer(tmp_path / "weights")
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "preprocessor_config.json").write_text("{}")
    for name in ("additional_chat_templates/brief.jinja", *HIDDEN, "../tokenizer.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("the contents")
    return folder


@pytest.fixture
def serve(api: Api, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Starts the API with another base model."""

    def serve(path: Path | str, name: str = BASE, **api_settings: str) -> FlaskClient:
        base = BaseModelSettings(name=name, path=str(path))
        mine = settings.model_copy(update={"base_models": (base,), "api": ApiSettings(**api_settings)})
        hub = HubService(mine, BaseModels(mine, api.services.records), HubCache())
        monkeypatch.setitem(api.client.application.extensions, EXTENSION, replace(api.services, hub=hub))
        return api.client

    return serve


def test_a_tokenizers_files_need_no_key_and_come_with_their_state(serve: Serve, folder: Path) -> None:
    client = serve(folder)
    about = client.get(f"/api/models/{BASE}").json
    assert {entry["rfilename"] for entry in about["siblings"]} == SERVED
    for entry in about["siblings"]:
        for revision in ("main", about["sha"]):
            url = f"/{BASE}/resolve/{revision}/{entry['rfilename']}"
            got, head = client.get(url), client.head(url)
            assert got.data == (folder / entry["rfilename"]).read_bytes()
            assert (head.status_code, head.data, head.headers["ETag"]) == (200, b"", f'"{entry["blobId"]}"')
            assert head.content_length == len(got.data) == entry["size"]
            assert head.headers["X-Repo-Commit"] == about["sha"]


def test_nothing_else_of_the_folder_is_served(serve: Serve, folder: Path) -> None:
    client = serve(folder)
    ways = ("../tokenizer.json", "%2e%2e/tokenizer.json", "..%2ftokenizer.json", str(folder / "tokenizer.json"))
    inside = ("./tokenizer.json", "additional_chat_templates/../model.safetensors", "tokenizer.json%00")
    for name in (*HIDDEN, *ways, *inside):
        answer = client.get(f"/{BASE}/resolve/main/{name}")
        # A path without a route asks for a key first.
        assert (name, answer.status_code in (401, 404)) == (name, True)
        assert b"the contents" not in answer.data
    for repository in (str(folder), f"/{folder}", "weights", "../weights", f"{BASE}/..", f"{BASE}/../tiny"):
        assert client.get(f"/{repository}/resolve/main/tokenizer.json").status_code in (401, 404)
    listed = client.get(f"/api/models/{BASE}/tree/main?recursive=true").json
    assert {entry["path"] for entry in listed} == SERVED
    assert client.get(f"/api/models/{BASE}/tree/main/private").status_code == 404


def test_a_folder_of_templates_can_be_listed(serve: Serve, folder: Path) -> None:
    (entry,) = serve(folder).get(f"/api/models/{BASE}/tree/main/additional_chat_templates").json
    assert (entry["type"], entry["path"]) == ("file", "additional_chat_templates/brief.jinja")


def test_a_changed_file_is_another_state_and_the_old_one_is_gone(serve: Serve, folder: Path) -> None:
    client = serve(folder)
    before = client.get(f"/api/models/{BASE}").json["sha"]
    (folder / "config.json").write_text('{"model_type": "llama"}')
    after = client.get(f"/api/models/{BASE}/revision/main").json["sha"]
    assert before != after
    answers = [client.get(f"/{BASE}/resolve/{commit}/config.json") for commit in (before, after)]
    assert [answer.status_code for answer in answers] == [404, 200]
    assert answers[0].headers["X-Error-Code"] == "RevisionNotFound"


def test_what_is_missing_is_named_by_the_hubs_codes(serve: Serve, folder: Path) -> None:
    client = serve(folder)
    missing = client.head(f"/{BASE}/resolve/main/tokenizer.model")
    unknown = client.get("/api/models/org/other")
    codes = [(answer.status_code, answer.headers["X-Error-Code"]) for answer in (missing, unknown)]
    assert codes == [(404, "EntryNotFound"), (404, "RepoNotFound")]


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("tiny", "tiny"),
        ("org/model/variant", "org/model"),
        ("org/model:128k", "org/model"),
        ("meta-llama/Llama-3.2-1B", "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"),
    ],
)
def test_a_name_is_found_as_the_sdk_cuts_it_for_the_hub(serve: Serve, folder: Path, name: str, asked: str) -> None:
    assert serve(folder, name).get(f"/{asked}/resolve/main/tokenizer.json").status_code == 200


def test_an_operator_can_turn_it_off(serve: Serve, folder: Path) -> None:
    assert serve(folder, tokenizers="local").get(f"/{BASE}/resolve/main/tokenizer.json").status_code == 404


def test_a_tokenizer_of_the_hub_is_served_from_its_cache(
    serve: Serve, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "hub/models--other--source"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("0" * 40)
    (cached / "snapshots").mkdir()
    folder.rename(cached / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    client = serve("other/source")
    for asked in (BASE, "other/source"):
        assert client.get(f"/{asked}/resolve/main/config.json").data == b'{"model_type": "qwen3"}'


def test_a_hub_that_is_silent_is_not_asked_again_for_every_stranger(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.stores.hub_cache._ANSWER_S", 1)
    with hub_of_models() as hub:
        hub.awake.clear()
        use_hub(monkeypatch, hub.url, tmp_path)
        client = serve("other/source")
        answers = [client.get(f"/{BASE}/resolve/main/tokenizer.json") for _ in range(3)]
        found = [(answer.status_code, float(answer.headers["Retry-After"]) > 0) for answer in answers]
        assert found == [(503, True)] * 3
        assert hub.asked == ["other/source"]


def test_a_tokenizer_that_is_not_in_the_cache_of_an_api_offline_is_not_served(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    answer = serve("other/source").get(f"/{BASE}/resolve/main/tokenizer.json")
    assert (answer.status_code, answer.headers["X-Error-Code"]) == (404, "RepoNotFound")
    assert "HF_HUB_OFFLINE is set" in answer.text


def test_strangers_do_not_wait_for_a_hub_that_is_slow(
    serve: Serve, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"/{BASE}/resolve/main/config.json"
    with hub_of_models() as hub:
        hub.repos["other/source"] = folder
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        monkeypatch.setattr("app.stores.hub_cache._PATIENCE_S", 0.01)
        client = serve("other/source")
        hub.awake.clear()
        answers = [client.get(path) for _ in range(2)]
        assert [(answer.status_code, "is being fetched" in answer.text) for answer in answers] == [(503, True)] * 2
        hub.awake.set()
        while (answer := client.get(path)).status_code == 503:
            time.sleep(0.01)
    assert answer.data == (folder / "config.json").read_bytes()
