"""The API alone, served by gunicorn: real server, real Valkey, no workers. Tests write the workers' records by hand."""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from app.domain.records import BaseModelInfo, Worker
from app.settings import SETTINGS_VARIABLE, EngineSettings, hash_key
from app.stores.redis.client import connect
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords, dump
from tests.servers import free_port, start_valkey

BASE = "tests/tiny"
KEY = "tml-test"
INFO = BaseModelInfo(BASE, "Qwen3ForCausalLM", 320, 512, "float32", ("attn", "mlp", "unembed"))


@dataclass(frozen=True)
class ApiServer:
    """The running API. `pid` is gunicorn's master process; its child answers."""

    port: int
    pid: int
    oplog: RedisOpLog
    records: RedisRecords

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def register_worker(self, role: str) -> None:
        worker = Worker(role, BASE, asdict(INFO), {}, "", time.time())
        self.records.put(Worker.namespace, f"{role}-0@test", dump(worker))


@contextlib.contextmanager
def start_api(folder: Path, extra: str = "", sampler: str = "") -> Iterator[ApiServer]:
    """Starts the API. `extra` and `sampler` are TOML for the [api] and [base_models.sampler] sections."""
    with start_valkey(folder / "valkey") as redis_url, serve(folder, redis_url, extra, sampler=sampler) as server:
        yield server


@contextlib.contextmanager
def serve(
    folder: Path, redis_url: str, extra: str = "", application: str = "app.wsgi:application", sampler: str = ""
) -> Iterator[ApiServer]:
    """Starts one more API process on a running state server."""
    port = free_port()
    config = folder / f"settings-{port}.toml"
    config.write_text(
        f'data_dir = "{folder}"\napi_keys = ["{hash_key(KEY)}"]\nurl_secret = "secret"\n'
        f'[redis]\nurl = "{redis_url}"\n[api]\nport = {port}\n{extra}\n'
        f'[[base_models]]\nname = "{BASE}"\npath = "{folder}"\n[base_models.sampler]\n{sampler}\n'
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "gunicorn", "-c", "python:app.gunicorn_conf", application],
        env={**os.environ, SETTINGS_VARIABLE: str(config)},
    )
    client = connect(redis_url)
    try:
        server = ApiServer(port, process.pid, RedisOpLog(client, EngineSettings()), RedisRecords(client))
        server.register_worker("trainer")
        server.register_worker("sampler")
        _await_health(port, process)
        yield server
    finally:
        process.terminate()
        process.wait(120)


def _await_health(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as probe:
            probe.request("GET", "/api/v1/healthz")
            if probe.getresponse().status == 200:
                return
        time.sleep(0.05)
    raise TimeoutError("the API did not start")
