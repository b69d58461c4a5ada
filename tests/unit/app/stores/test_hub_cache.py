"""A Hub that is silent, slow or away, and what its cache has."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.errors import BadRequest, Unavailable
from app.stores.hub_cache import HubCache
from tests.hub_of_models import Hub, hub_of_models, use_hub
from tests.tokenizers import byte_tokenizer

ID = "org/model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with one model, of a tokenizer and weights."""
    with hub_of_models() as found:
        found.repos[ID] = byte_tokenizer(tmp_path / "model")
        (found.repos[ID] / "model.safetensors").write_text("weights")
        use_hub(monkeypatch, found.url, tmp_path / "cache")
        yield found


@pytest.fixture
def silent(hub: Hub) -> Hub:
    hub.awake.clear()
    return hub


@pytest.fixture
def patience(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers wait for a moment."""
    monkeypatch.setattr("app.stores.hub_cache._PATIENCE_S", 0.05)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent Hub counts as away after a moment."""
    monkeypatch.setattr("app.stores.hub_cache._ANSWER_S", 1)


@pytest.mark.usefixtures("patience")
def test_callers_of_a_silent_hub_learn_after_a_moment_what_is_fetched_from_where(silent: Hub, tmp_path: Path):
    cache = HubCache()
    for _ in range(3):
        with pytest.raises(Unavailable, match=rf"the tokenizer of {ID} from 127\.0\.0\.1 is being fetched"):
            cache.folder(ID)
    assert cache.folder(str(tmp_path)) == tmp_path
    while not silent.asked:
        time.sleep(0.01)
    assert silent.asked == [ID]


@pytest.mark.usefixtures("quick")
def test_a_hub_that_stays_silent_is_asked_again_after_a_minute_only(silent: Hub, monkeypatch: pytest.MonkeyPatch):
    cache = HubCache()
    for _ in range(3):
        with pytest.raises(Unavailable, match=rf"{ID} from 127\.0\.0\.1 cannot be fetched: .*; try again in a minute"):
            cache.folder(ID)
    assert silent.asked == [ID]
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 60)
    with pytest.raises(Unavailable):
        cache.folder(ID)
    assert silent.asked == [ID, ID]


@pytest.mark.usefixtures("quick")
def test_a_silent_hub_for_one_tokenizer_is_still_asked_for_another(silent: Hub):
    cache = HubCache()
    for source in (ID, "org/other"):
        with pytest.raises(Unavailable, match=source):
            cache.folder(source)
    assert silent.asked == [ID, "org/other"]


@pytest.mark.usefixtures("patience")
def test_a_fetch_goes_on_when_its_caller_has_gone(hub: Hub):
    cache = HubCache()
    hub.awake.clear()
    with pytest.raises(Unavailable, match="is being fetched"):
        cache.folder(ID)
    hub.awake.set()
    while True:
        try:
            folder = cache.folder(ID)
        except Unavailable:
            time.sleep(0.01)
        else:
            break
    assert {file.name for file in folder.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}


def test_a_tokenizer_is_fetched_once(hub: Hub):
    cache = HubCache()
    folder = cache.folder(ID)
    hub.repos.clear()
    assert cache.folder(ID) == folder
    assert sorted(hub.sent) == ["tokenizer.json", "tokenizer_config.json"]


def test_files_that_the_hub_refuses_make_no_tokenizer(hub: Hub):
    hub.gated.add(ID)
    with pytest.raises(Unavailable, match="cannot be fetched: GatedRepoError"):
        HubCache().folder(ID)


def test_a_silent_hub_leaves_what_is_in_its_cache(hub: Hub, request: pytest.FixtureRequest):
    folder = HubCache().folder(ID)
    request.getfixturevalue("quick")
    hub.awake.clear()
    (folder / "tokenizer_config.json").unlink()
    assert HubCache().folder(ID) == folder
    (folder / "tokenizer.json").unlink()
    with pytest.raises(Unavailable, match="cannot be fetched"):
        HubCache().folder(ID)


def test_what_the_cache_has_is_served_while_the_hub_is_asked_again(
    hub: Hub, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    folder = HubCache().folder(ID)
    request.getfixturevalue("quick")
    hub.awake.clear()
    cache = HubCache()
    assert cache.folder(ID) == folder
    asked, now = len(hub.asked), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 60)
    monkeypatch.setattr("app.stores.hub_cache._PATIENCE_S", 0.0)
    assert cache.folder(ID) == folder
    while len(hub.asked) == asked:
        time.sleep(0.01)
    assert cache.folder(ID) == folder


def test_offline_the_cache_is_all_there_is(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = HubCache().folder(ID)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (folder / "tokenizer_config.json").unlink()
    assert HubCache().folder(ID) == folder
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(BadRequest, match=rf"{ID}.*not in the Hub's cache.*HF_HUB_OFFLINE.*base_models\.tokenizer"):
        HubCache().folder(ID)


@pytest.mark.usefixtures("hub")
def test_a_source_that_is_no_hub_id_is_named_with_the_remedy():
    with pytest.raises(BadRequest, match=r"'a/b/c' is neither a folder here nor a hub id; correct base_models"):
        HubCache().folder("a/b/c")
