"""The demo's own stack: `tinsmith up` as a child process, and the parts that really run in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from app import settings as settings_module
from app.domain import records
from app.domain.records import Worker
from app.stack.child import end_with
from app.stack.supervisor import SETUP_ERROR_CODE
from app.stores import objects
from app.stores.redis.client import connect
from app.stores.redis.records import RedisRecords

_STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class Stack:
    """A running stack: its URL, its API key, and its data folder."""

    url: str
    api_key: str
    data_dir: Path

    def parts(self) -> Iterator[tuple[str, str]]:
        """Yields (part, description), as the live processes report them."""
        settings = settings_module.load(self.data_dir / "run" / "settings.toml")
        with connect(settings.redis.url) as client:
            for node, stored in RedisRecords(client).list(Worker.namespace):
                worker = records.load(Worker, stored)
                yield node, ", ".join(f"{key}={_brief(value)}" for key, value in worker.describe.items())
            yield "state", f"{_server(client)}, append-only"
        with connect(settings.broker_url) as client:
            yield "broker", f"Celery on {_server(client)}"
        yield "object store", f"{type(objects.create(settings)).__name__}, {self.data_dir / 'objects'}"


def _server(client: redis.Redis) -> str:
    server = client.info("server")
    version = server.get("valkey_version", server["redis_version"])
    return f"{server.get('server_name', 'redis')} {version}, port {server['tcp_port']}"


def _brief(value: object) -> str:
    """A value as text; of a long list (the adapters a sampler holds) only the length."""
    return str(len(value)) if isinstance(value, list) and len(str(value)) > 20 else str(value)


@contextmanager
def running(data_dir: Path) -> Iterator[Stack]:
    """Starts the stack, waits until it serves, and stops it at the end.

    Raises SystemExit with the stack's exit code when it does not start; the stack has printed the reason.
    """
    data_dir = data_dir.expanduser().absolute()
    parent = os.getpid()
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", "up", "--port", "0", "--data-dir", str(data_dir)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: end_with(parent),
    )
    try:
        yield Stack(_ready_url(process), (data_dir / "api-key").read_text().strip(), data_dir)
    finally:
        process.terminate()
        process.wait(_STOP_S)


def _ready_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        word, _, url = line.strip().partition(" ")
        if word == "ready":
            return url
    sys.exit(SETUP_ERROR_CODE if process.wait() == SETUP_ERROR_CODE else 1)
