"""URLs of services behind sentinels, and the clients that they name."""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from app.errors import SetupError
from app.settings import parse
from app.stores.redis.client import connect, connect_state, is_outage
from app.stores.redis.sentinel import _Sentinels
from tests.sentinels import SERVICE, start_sentinel
from tests.servers import free_port, start_valkey
from tests.tls import tls_in_front, write_certificate

URL = "redis+sentinel://:secret@a:1,b:2,c:3/service?db=2"


def test_the_url_names_the_sentinels_and_the_service_and_how_to_log_in_at_its_servers():
    pool = connect("redis+sentinel://user:p%40ss@a:1,b:2,[::1]:3/service?db=2").connection_pool
    places = [sentinel.connection_pool.connection_kwargs for sentinel in pool.sentinel_manager.sentinels]
    assert [(place["host"], place["port"]) for place in places] == [("a", 1), ("b", 2), ("::1", 3)]
    assert pool.service_name == "service"
    options = pool.connection_kwargs
    assert (options["username"], options["password"], options["db"]) == ("user", "p@ss", 2)
    assert not any(place.get("password") for place in places), "sentinels have their own"


def test_sentinels_have_a_login_of_their_own():
    url = "redis+sentinel://:secret@a:1,b:2/service?db=2&sentinel_username=me&sentinel_password=p%2540%26ss"
    pool = connect(url).connection_pool
    for sentinel in pool.sentinel_manager.sentinels:
        place = sentinel.connection_pool.connection_kwargs
        assert (place["username"], place["password"], place["db"]) == ("me", "p%40&ss", 0)
    options = pool.connection_kwargs
    assert (options["password"], options["db"], options.get("username")) == ("secret", 2, None)


def test_sentinels_with_a_password_are_asked_with_it(tmp_path: Path):
    with start_valkey(tmp_path / "server", port := free_port()) as server:
        with redis.Redis.from_url(server) as client:
            client.config_set("requirepass", "theirs")
        login = f"sentinel auth-pass {SERVICE} theirs"
        with start_sentinel(tmp_path / "sentinel", port, 1, 'requirepass "its own"', login) as sentinel:
            url = f"redis+sentinel://:theirs@127.0.0.1:{sentinel}/{SERVICE}?sentinel_password="
            with connect_state(url + "its%20own") as client:
                assert client.ping()
            for wrong in (url + "another", url.partition("?")[0]):
                with (
                    connect_state(wrong) as client,
                    pytest.raises(redis.ConnectionError, match="another sentinel_passw"),
                ):
                    client.ping()


def test_with_tls_neither_sentinels_nor_servers_are_spoken_to_in_plain_text(tmp_path: Path):
    certificate = write_certificate(tmp_path)
    with ExitStack() as running:
        server = free_port()
        running.enter_context(start_valkey(tmp_path / "server", server))
        public, at_server = running.enter_context(tls_in_front(server, certificate))
        # The sentinel itself speaks to the server in plain text.
        sentinel = running.enter_context(start_sentinel(tmp_path / "sentinel", public, 1))
        asked, at_sentinel = running.enter_context(tls_in_front(sentinel, certificate))
        place = f"127.0.0.1:{asked}/{SERVICE}"
        with connect_state(f"rediss+sentinel://{place}?ssl_ca_certs={certificate}") as client:
            assert client.ping()
        assert at_sentinel and all(at_sentinel)
        assert at_server.count(True) == 1
        with connect_state(f"rediss+sentinel://{place}") as client, pytest.raises(redis.ConnectionError):
            client.ping()


@pytest.mark.parametrize("url", ["redis+sentinel://a:1,b:2", "redis+sentinel://a,b:2/service", "redis+sentinel:///s"])
def test_a_url_of_another_form_is_refused_with_the_form(url: str):
    with pytest.raises(ValueError, match="host:port,host:port,host:port/service"):
        connect(url)


def test_the_options_of_every_client_hold():
    plain, behind = connect("redis://a:1/0").connection_pool, connect_state(URL).connection_pool
    without = {"host", "port", "db", "connection_pool", "himport_registry"}
    options = {name: value for name, value in plain.connection_kwargs.items() if name not in without}
    names = [name for name in options if "maint" not in name and not name.startswith("orig_")]
    assert {name: behind.connection_kwargs[name] for name in names} == {name: options[name] for name in names}
    assert "socket_keepalive_options" in names
    assert (behind.timeout, behind.max_connections) == (plain.timeout, plain.max_connections)
    assert behind.connection_kwargs["redis_connect_func"] is not None


def test_sentinels_that_are_away_are_an_outage_in_one_line():
    with connect("redis+sentinel://:secret@127.0.0.1:1,127.0.0.1:1/service") as client:
        with pytest.raises(redis.ConnectionError, match=r"^no sentinel names a primary of 'service'$") as caught:
            client.ping()
        assert is_outage(caught.value)


def test_the_sentinels_are_asked_one_thread_at_a_time():
    """redis-py reorders its list of them, and two threads could lose one."""
    sentinels, within, together = _Sentinels([]), 0, []
    lock, both = threading.Lock(), threading.Barrier(2, timeout=0.5)

    class Answering:
        def sentinel_masters(self) -> dict[str, Any]:
            nonlocal within
            with lock:
                within += 1
                together.append(within)
            with suppress(threading.BrokenBarrierError):
                both.wait()
            with lock:
                within -= 1
            state = {"is_master": True, "is_sdown": False, "is_odown": False, "num-other-sentinels": 0}
            return {"service": {**state, "ip": "a", "port": 1}}

    sentinels.sentinels = [Answering()]
    threads = [threading.Thread(target=sentinels.discover_master, args=("service",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [1, 1]


@pytest.mark.parametrize("broker", ["", "redis+sentinel://a:1/broker", "rediss+sentinel://a:1/broker"])
def test_the_broker_is_a_server_of_its_own(broker: str):
    section = {"url": URL} if not broker else {"url": "redis://a:1/0", "broker_url": broker}
    with pytest.raises(SetupError, match=r"redis\.broker_url: the broker is one Redis server") as caught:
        parse({"redis": section}, "a.toml")
    assert "secret" not in str(caught.value)
    assert parse({"redis": {"url": URL, "broker_url": "redis://b:1/0"}}, "a.toml").broker_url == "redis://b:1/0"
