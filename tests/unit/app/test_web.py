"""Start of the API process."""

from __future__ import annotations

import logging
import runpy
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from gunicorn import glogging
from gunicorn.config import Config
from gunicorn.util import parse_address

from app import create_app
from app.api.base import EXTENSION
from app.errors import SetupError
from app.gunicorn_worker import ARRIVING, Worker
from app.server.shared_listener import COUNTS
from app.settings import SETTINGS_VARIABLE, RedisSettings, Settings, from_environment, load


@pytest.fixture
def config(tmp_path: Path, client: redis.Redis, valkey: str) -> Path:
    path = tmp_path / "tinsmith.toml"
    path.write_text(
        f'data_dir = "{tmp_path}"\n[redis]\nurl = "{valkey}"\n[api]\npoll_capacity = 100\nspare_threads = 20\n'
    )
    return path


def test_gunicorn_has_threads_for_every_poll_and_more_and_connections_above_them(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTINGS_VARIABLE, str(config))
    settings = runpy.run_module("app.gunicorn_conf")
    assert (settings["workers"], settings["threads"]) == (1, 120)
    assert settings["worker_connections"] > settings["threads"] + ARRIVING


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("[::1]", "http://[::1]:8000"),
        ("localhost", "http://localhost:8000"),
    ],
)
def test_the_api_listens_where_its_url_says(host: str, url: str, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text(config.read_text() + f'host = "{host}"\n')
    monkeypatch.setenv(SETTINGS_VARIABLE, str(config))
    assert parse_address(runpy.run_module("app.gunicorn_conf")["bind"]) == (host.strip("[]"), 8000)
    assert from_environment().public_url == url
    assert (urlsplit(url).hostname, urlsplit(url).port) == (host.strip("[]"), 8000)


def test_files_are_sent_by_calls_that_end_when_a_client_reads_nothing(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTINGS_VARIABLE, str(config))
    assert runpy.run_module("app.gunicorn_conf")["sendfile"] is False, "socket.sendfile knows no SO_SNDTIMEO"


def test_no_fields_of_a_request_are_put_together_for_an_access_log_that_nothing_writes(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTINGS_VARIABLE, str(config))
    settings = runpy.run_module("app.gunicorn_conf")
    monkeypatch.setattr(glogging, "dictConfig", lambda _: None)  # the tests keep their own handlers
    served = Config()
    for name in ("logger_class", "logconfig_dict"):
        served.set(name, settings[name])
    logger = served.logger_class(served)
    monkeypatch.setattr(logger, "atoms", lambda *_: pytest.fail("a record for no log"))
    logger.access(object(), object(), {}, timedelta(0))


def test_a_process_that_ends_sends_its_task_events_first(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTINGS_VARIABLE, str(config))
    application = create_app(from_environment())
    events = application.extensions[EXTENSION].dispatcher.events
    sent: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(events, "_send", sent.extend)
    events.admitted("session:sample:0:0", "sample", "me")
    worker_exit = runpy.run_module("app.gunicorn_conf")["worker_exit"]
    worker = Worker(1, 1, [], SimpleNamespace(wsgi=lambda: application), 30, Config(), logging.getLogger())
    worker.load_wsgi()
    worker_exit(None, worker)
    assert not events._thread.is_alive()
    assert [(type_, fields["uuid"]) for type_, fields in sent] == [("task-sent", "session:sample:0:0")]
    worker_exit(None, Worker(1, 1, [], None, 30, Config(), logging.getLogger()))  # one that could not start


def test_settings_without_a_state_server_are_refused_with_the_remedy() -> None:
    with pytest.raises(SetupError, match=r"redis\.url"):
        create_app(Settings())


def test_an_api_does_not_start_on_another_object_store(client: redis.Redis, valkey: str, tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, redis=RedisSettings(url=valkey))
    create_app(settings)
    (tmp_path / "objects").rename(tmp_path / "unmounted")
    with pytest.raises(SetupError, match="mount its disk"):
        create_app(settings)


def test_settings_that_would_have_no_effect_are_refused(config: Path) -> None:
    config.write_text(f'capture_secret = "short"\n{config.read_text()}')
    with pytest.raises(SetupError, match="capture_secret has 5 characters"):
        create_app(load(config))


def test_the_connections_of_a_process_that_has_ended_count_no_more(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the others would leave new ones to it for ever."""
    monkeypatch.setenv(SETTINGS_VARIABLE, str(config))
    child_exit = runpy.run_module("app.gunicorn_conf")["child_exit"]
    COUNTS.put(1, 5)
    COUNTS.put(2, 9)
    child_exit(None, SimpleNamespace(age=1, pid=1))
    assert COUNTS.least() == 9
    COUNTS.remove(2)
