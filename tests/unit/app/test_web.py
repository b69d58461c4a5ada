"""Start of the API process."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from app import create_app
from app.errors import SetupError
from app.gunicorn_worker import ARRIVING
from app.settings import SETTINGS_VARIABLE, Settings


@pytest.fixture
def config(tmp_path: Path, state_url: str) -> Path:
    path = tmp_path / "tinsmith.toml"
    path.write_text(
        f'data_dir = "{tmp_path}"\n[redis]\nurl = "{state_url}"\n[api]\npoll_capacity = 100\nspare_threads = 20\n'
    )
    return path


def test_gunicorn_has_threads_for_every_poll_and_more_and_connections_above_them(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTINGS_VARIABLE, str(config))
    settings = runpy.run_module("app.gunicorn_conf")
    assert (settings["workers"], settings["threads"]) == (1, 120)
    assert settings["worker_connections"] > settings["threads"] + ARRIVING


def test_files_are_sent_by_calls_that_end_when_a_client_reads_nothing(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTINGS_VARIABLE, str(config))
    assert runpy.run_module("app.gunicorn_conf")["sendfile"] is False, "socket.sendfile knows no SO_SNDTIMEO"


def test_settings_without_a_state_server_are_refused_with_the_remedy() -> None:
    with pytest.raises(SetupError, match=r"redis\.url"):
        create_app(Settings())
