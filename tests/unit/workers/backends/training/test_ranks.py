from __future__ import annotations

import os

import pytest

from workers.backends.training.ranks import default_environment

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def test_a_lone_process_is_a_group_of_one_and_its_children_are_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    with default_environment():
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
    assert [name for name in NAMES if name in os.environ] == ["LOCAL_RANK"]


def test_a_launchers_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "1")
    with default_environment():
        assert os.environ["MASTER_PORT"] == "1"
    assert os.environ["RANK"] == "1"
