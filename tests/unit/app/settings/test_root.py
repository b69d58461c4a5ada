"""Settings that follow from several sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.settings import Settings, parse, root


def settings(**given: Any) -> Settings:
    return parse(given, "a.toml")


@pytest.mark.parametrize(
    ("api", "names_folders"),
    [
        ({}, True),
        ({"host": "::1"}, True),
        ({"public_url": "http://localhost:8000"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"public_url": "https://tinsmith.example.org"}, False),
        ({"host": "0.0.0.0", "public_url": "http://localhost:8000"}, False),
        ({"host": "0.0.0.0", "tokenizers": "local"}, True),
        ({"tokenizers": "served"}, False),
    ],
    ids=str,
)
def test_clients_load_tokenizers_from_a_folder_only_where_all_of_them_are_on_this_machine(
    api: dict[str, Any], names_folders: bool
) -> None:
    assert settings(api=api).names_folders == names_folders


@pytest.mark.parametrize("section", ["sampler", "full_sampler"])
def test_a_client_has_no_more_samples_under_way_than_a_queue_or_the_polls_take(section: str) -> None:
    base = {"name": "a", "path": "o/a", section: {"queue_requests": 9}}
    assert settings(base_models=[base], api={"poll_capacity": 10}).concurrent_samples == 9
    assert settings(base_models=[base], api={"poll_capacity": 8}).concurrent_samples == 8


def test_the_folder_of_new_weights_is_named_without_links(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    assert settings(engine={"handover_dir": str(tmp_path / "link")}).handover_dir == (tmp_path / "disk").resolve()


def test_each_data_folder_has_a_folder_of_its_own_in_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(root, "_SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    first, same, other = (settings(data_dir=str(given)).handover_dir for given in ("a", tmp_path / "a", "b"))
    assert first == same != other and first.parent == other.parent == tmp_path / "shm"


def test_without_shared_memory_new_weights_pass_through_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root, "_SHARED_MEMORY", tmp_path / "none")
    assert settings(data_dir=str(tmp_path)).handover_dir == tmp_path / "handover"
