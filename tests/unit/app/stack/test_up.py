from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
import redis

from app.domain.records import LAST_WORKERS, Refusal, Worker
from app.errors import SetupError
from app.settings import ApiSettings, BaseModelSettings, Settings
from app.stack import ports, up
from app.stack.child import Command
from app.stack.data_folder import DataFolder
from app.stores.redis.records import RedisRecords


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("::", "http://[::1]:8000"),
        ("host.example", "http://host.example:8000"),
    ],
)
def test_the_url_of_a_ready_stack_is_one_that_this_machine_can_open(host: str, url: str) -> None:
    assert up._local_url(ApiSettings(host=host)) == url


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" else 404)
        self.end_headers()


@pytest.fixture
def ready_url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that knows nothing of this machine: nothing listens there."""
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")


@pytest.mark.usefixtures("proxy")
def test_a_stack_is_ready_whatever_proxy_the_environment_names(ready_url: str) -> None:
    assert up._is_ready(ready_url)


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
@pytest.mark.usefixtures("proxy")
def test_clients_reach_this_machine_without_the_proxy_and_keep_the_exceptions_that_were_named(
    ready_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "example.org")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{ready_url}/readyz")
    for variable, value in ports.without_proxy(os.environ).items():
        monkeypatch.setenv(variable, value)
        assert value.startswith("example.org,")
    assert httpx.get(f"{ready_url}/readyz").status_code == 200
    assert httpx.get(f"{ready_url}/readyz".replace("127.0.0.1", "localhost")).status_code == 200


def test_a_new_stack_knows_nothing_of_its_base_models_from_a_former_one(client: redis.Redis) -> None:
    """The settings may give the name to another model."""
    records, here = RedisRecords(client), f"@{socket.gethostname()}"
    for namespace, key in (
        *((Worker.namespace, f"trainer-0{where}") for where in (here, "@elsewhere")),
        *((kind, Refusal.id("trainer", base)) for kind in (Refusal.namespace, LAST_WORKERS) for base in ("a", "b")),
    ):
        records.put(namespace, key, {"role": '"trainer"'})
    settings = Settings(base_models=(BaseModelSettings(name="a", path="a"),))
    up._forget_workers(records, settings, [Command("trainer-0", ("true",), {})])
    left = {
        (kind, key) for kind in (Worker.namespace, Refusal.namespace, LAST_WORKERS) for key, _ in records.list(kind)
    }
    assert left == {
        (Worker.namespace, "trainer-0@elsewhere"),
        (Refusal.namespace, "trainer/b"),
        (LAST_WORKERS, "trainer/b"),
    }


def test_a_stack_with_given_keys_signs_urls_with_a_secret_that_it_keeps(tmp_path: Path) -> None:
    """Without one it has no downloads and no console."""
    folder = DataFolder(tmp_path)
    first, second = (up._with_secrets(Settings(api_keys=("a" * 64,)), folder) for _ in range(2))
    assert first.url_secret == second.url_secret == (tmp_path / "url-secret").read_text().strip() != ""
    assert up._with_secrets(Settings(api_keys=("a" * 64,), url_secret="s" * 32), folder).url_secret == "s" * 32
    folder.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_fills_up_later_is_named_with_its_folder(number: int, tmp_path: Path) -> None:
    with closing(DataFolder(tmp_path)) as folder:
        said = f"cannot write to the data folder {tmp_path}: {os.strerror(number)}"
        with pytest.raises(SetupError, match=said), up._full_disk_named(folder):
            raise OSError(number, os.strerror(number))
        with pytest.raises(PermissionError), up._full_disk_named(folder):
            raise PermissionError("the file of a model")
