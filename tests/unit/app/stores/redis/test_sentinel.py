"""URLs of services behind sentinels, and the clients that they name."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest
import redis

from app.errors import SetupError
from app.settings import parse
from app.stores.redis.client import connect, connect_state, is_outage
from app.stores.redis.sentinel import _Sentinels

URL = "redis+sentinel://:secret@a:1,b:2,c:3/service?db=2"


def test_the_url_names_the_sentinels_and_the_service_and_how_to_log_in_at_its_servers():
    pool = connect("redis+sentinel://user:p%40ss@a:1,b:2,[::1]:3/service?db=2").connection_pool
    places = [sentinel.connection_pool.connection_kwargs for sentinel in pool.sentinel_manager.sentinels]
    assert [(place["host"], place["port"]) for place in places] == [("a", 1), ("b", 2), ("::1", 3)]
    assert pool.service_name == "service"
    options = pool.connection_kwargs
    assert (options["username"], options["password"], options["db"]) == ("user", "p@ss", 2)
    assert not any("password" in place and place["password"] for place in places), "sentinels have their own"


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


@pytest.mark.parametrize("broker", ["", "redis+sentinel://a:1/broker"])
def test_the_broker_is_a_server_of_its_own(broker: str):
    section = {"url": URL} if not broker else {"url": "redis://a:1/0", "broker_url": broker}
    with pytest.raises(SetupError, match=r"redis\.broker_url: the broker is one Redis server") as caught:
        parse({"redis": section}, "a.toml")
    assert "secret" not in str(caught.value)
    assert parse({"redis": {"url": URL, "broker_url": "redis://b:1/0"}}, "a.toml").broker_url == "redis://b:1/0"
