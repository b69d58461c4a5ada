"""Servers under measurement, started as users start them: the whole stack, or the API alone on its Valkey."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomli_w

from app import settings as settings_module
from app.domain.records import BaseModelInfo, Worker
from app.settings import BaseModelSettings, Settings, hash_key
from app.stack import ports, up, valkey
from app.stack.child import Child, Command, end_with
from app.stores.redis.client import connect
from app.stores.redis.records import RedisRecords, dump, load

API_KEY = "tml-bench-on-this-machine"
_START_S = 120.0
_STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class Stack:
    """A running `tinsmith up`."""

    url: str
    data_dir: Path

    @property
    def settings_file(self) -> Path:
        """Settings file that every process of the stack reads."""
        return self.data_dir / "run" / "settings.toml"

    def metrics_url(self, role: str) -> str:
        """Metrics URL of a worker; role is trainer or sampler."""
        settings = settings_module.load(self.settings_file)
        with connect(settings.redis.url) as client:
            workers = [load(Worker, found) for _, found in RedisRecords(client).list(Worker.namespace)]
        return next(worker.metrics_url for worker in workers if worker.role == role)


@contextmanager
def running_stack(
    folder: Path,
    base: BaseModelSettings,
    engine: Mapping[str, Any] = MappingProxyType({}),
    keys: Sequence[str] = (API_KEY,),
) -> Iterator[Stack]:
    """Runs `tinsmith up` on one base model, with the defaults except for `engine`.

    Its output goes to folder/up.log. Each of the `keys` is a separate project.
    """
    config, data_dir, log = folder / "tinsmith.toml", folder / "data", folder / "up.log"
    config.write_text(
        tomli_w.dumps(
            {
                "api_keys": [hash_key(key) for key in keys],
                "base_models": [base.model_dump(mode="json", exclude_none=True)],
                "engine": dict(engine),
            }
        )
    )
    parent = os.getpid()
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "app.cli", "up", "--config", config, "--data-dir", data_dir, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            preexec_fn=lambda: end_with(parent),
        )
    try:
        yield Stack(_ready_url(process, log), data_dir)
    finally:
        process.terminate()
        process.communicate(timeout=_STOP_S)


def _ready_url(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        word, _, url = line.strip().partition(" ")
        if word == "ready":
            return url
    raise RuntimeError(f"the stack did not start:\n{log.read_text()[-2000:]}")


@dataclass(frozen=True, slots=True)
class Api:
    """Start arguments of the API process, and its address."""

    settings: Settings
    settings_file: Path
    command: Command

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.api.port}"


@contextmanager
def prepared_api(folder: Path, info: BaseModelInfo, poll_capacity: int | None = None) -> Iterator[Api]:
    """A Valkey server, and settings for an API on it that sees a trainer for the base model of `info`."""
    redis_port, password = ports.free_port("127.0.0.1", 0), "bench"
    config = folder / "valkey.conf"
    command = valkey.command("valkey", folder, config, redis_port, password, valkey.DURABLE)
    server = Child(command, folder / "valkey.log")
    server.start()
    try:
        redis_url = valkey.url(redis_port, password)
        _await(lambda: valkey.answers(redis_url), "Valkey")
        _register_trainer(redis_url, info)
        yield _api(folder, redis_url, info.name, {} if poll_capacity is None else {"poll_capacity": poll_capacity})
    finally:
        server.kill_group()


@contextmanager
def running_api(api: Api) -> Iterator[int]:
    """Runs gunicorn with the API; yields its process group after it has answered a request."""
    child = Child(api.command, api.settings.data_dir / "api.log")
    child.start()
    try:
        _await(lambda: _answers(f"{api.url}/api/v1/healthz"), "the API")
        assert child.pid is not None
        yield child.pid
    finally:
        child.kill_group()


def _api(folder: Path, redis_url: str, base: str, api: Mapping[str, int]) -> Api:
    raw = {
        "data_dir": str(folder),
        "api_keys": [hash_key(API_KEY)],
        "url_secret": "bench",
        "redis": {"url": redis_url},
        "api": {"port": ports.free_port("127.0.0.1", 0), **api},
        "base_models": [{"name": base, "path": str(folder)}],
    }
    file = folder / "settings.toml"
    file.write_text(tomli_w.dumps(raw))
    settings = settings_module.load(file)
    (command,) = (command for command in up.process_table(settings, file) if command.name == "api")
    return Api(settings, file, command)


def _register_trainer(redis_url: str, info: BaseModelInfo) -> None:
    worker = Worker("trainer", info.name, asdict(info), {}, "", time.time())
    with connect(redis_url) as client:
        RedisRecords(client).put(Worker.namespace, "trainer-0", dump(worker))


def _await(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _START_S
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not start within {_START_S:.0f} s")
        time.sleep(0.005)


def _answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)
    return False
