"""A state server that may lose what it acknowledges is refused, whenever a connection to it is made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from app.errors import SetupError
from app.stores.redis import durability
from app.stores.redis.client import connect, connect_state, is_outage
from app.stores.redis.durability import NotDurable, check_at_start
from tests.faults.proxy import Rewriting
from tests.servers import MAX_MEMORY, free_port, start_valkey

DURABLE = {
    "appendonly": "yes",
    "appendfsync": "always",
    "maxmemory-policy": "noeviction",
    "maxmemory": MAX_MEMORY,
}


@pytest.fixture(scope="module")
def own_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_valkey(tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture
def server(own_url: str) -> Iterator[redis.Redis]:
    with connect(own_url) as client:
        yield client
        client.replicaof("NO", "ONE")
        for name, value in DURABLE.items():
            client.config_set(name, value)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("appendonly", "no", "set appendonly yes"),
        ("appendfsync", "everysec", "set appendfsync always"),
        ("maxmemory-policy", "allkeys-lru", "set maxmemory-policy noeviction"),
        ("maxmemory", 0, "set maxmemory"),
    ],
)
def test_a_setting_with_which_calls_get_lost_is_refused_with_its_remedy(
    own_url: str, server: redis.Redis, name: str, value: str | int, remedy: str
):
    server.config_set(name, value)
    with connect_state(own_url) as client:
        with pytest.raises(NotDurable, match=remedy) as caught:
            client.set("a", 1)
        assert is_outage(caught.value)
        with pytest.raises(SetupError, match=remedy):
            check_at_start(client)
        server.config_set(name, DURABLE[name])
        check_at_start(client)


def test_every_wrong_setting_is_named_at_once(own_url: str, server: redis.Redis):
    server.config_set("appendonly", "no")
    server.config_set("maxmemory-policy", "volatile-ttl")
    with connect_state(own_url) as client, pytest.raises(NotDurable, match=r"appendonly yes.*is volatile-ttl"):
        client.ping()


def test_a_replica_is_refused(own_url: str, server: redis.Redis):
    server.replicaof("127.0.0.1", "1")
    with (
        connect_state(own_url) as client,
        pytest.raises(NotDurable, match="it is a standalone slave; name a"),
    ):
        client.ping()


def test_a_cluster_is_refused(tmp_path: Path):
    with (
        start_valkey(tmp_path, options=("--cluster-enabled", "yes", "--cluster-port", str(free_port()))) as url,
        connect_state(url) as client,
        pytest.raises(NotDurable, match="it is a cluster master"),
    ):
        client.ping()


def test_a_version_before_7_is_refused(own_url: str):
    with (
        Rewriting(own_url, b"redis_version:7", b"redis_version:6") as older,
        connect_state(older.url) as client,
        pytest.raises(NotDurable, match=r"its version is 6\..*use Redis 7"),
    ):
        client.ping()


def test_a_version_that_is_no_number_is_refused(own_url: str):
    with (
        Rewriting(own_url, b"redis_version:7", b"redis_version:x") as strange,
        connect_state(strange.url) as client,
        pytest.raises(NotDurable, match=r"its version is x\..*use Redis 7"),
    ):
        client.ping()


def test_where_config_is_forbidden_the_rest_is_checked_and_one_line_says_what_is_not(
    own_url: str, server: redis.Redis, caplog: pytest.LogCaptureFixture
):
    durability._warn_once.cache_clear()
    server.acl_setuser("managed", enabled=True, nopass=True, keys=["*"], categories=["+@all"], commands=["-config"])
    server.config_set("appendfsync", "everysec")
    limited = own_url.replace("redis://", "redis://managed:any@")
    for _ in range(2):
        with connect_state(limited) as client:
            check_at_start(client)
    assert len([line for line in caplog.messages if "make sure that its appendfsync is always" in line]) == 1
    server.config_set("appendonly", "no")
    with connect_state(limited) as client, pytest.raises(SetupError, match="set appendonly yes"):
        check_at_start(client)


def test_a_server_that_came_back_with_other_settings_takes_no_call_until_they_are_right(tmp_path: Path):
    port = free_port()
    with start_valkey(tmp_path / "a", port) as url:
        client = connect_state(url)
        client.set("a", 1)
    with start_valkey(tmp_path / "b", port, options=("--appendfsync", "everysec")):
        _lose_connections(client)
        with pytest.raises(NotDurable, match="set appendfsync always"):
            client.set("a", 2)
    with start_valkey(tmp_path / "c", port):
        _lose_connections(client)
        assert client.set("a", 3)
    client.close()


def test_a_server_that_is_away_at_the_start_is_no_error():
    with connect_state(f"redis://127.0.0.1:{free_port()}/0") as client:
        check_at_start(client)


def _lose_connections(client: redis.Redis) -> None:
    """Meets the end of each connection to the former server."""
    client.connection_pool.disconnect()
