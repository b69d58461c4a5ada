"""Dispatch while the broker is full or down."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
from celery import Celery
from kombu import Consumer, Exchange, Queue

from app.dispatch import Dispatcher, TickSender, celery_app
from app.settings import RedisSettings, Settings
from app.stores.redis.client import connect
from app.stores.redis.types import Holder
from tests.faults.proxy import Proxy
from tests.servers import free_port, start_valkey

QUEUE = "train.base@a"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A separate broker, because these tests fill it."""
    with start_valkey(tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture
def broker(url: str) -> Iterator[redis.Redis]:
    with connect(url) as client:
        yield client
        client.config_set("maxmemory", 0)
        client.flushall()


def at(url: str, tmp_path: Path) -> Celery:
    return celery_app(Settings(data_dir=tmp_path, redis=RedisSettings(url=url)))


def away(tmp_path: Path) -> Celery:
    return at(f"redis://127.0.0.1:{free_port()}/0", tmp_path)


def test_a_worker_that_sends_itself_ticks_knows_what_waits(url: str, broker: redis.Redis, tmp_path: Path):
    ticks = TickSender(at(url, tmp_path), QUEUE)
    assert ticks.waiting() == 0
    assert ticks.send()
    assert ticks.waiting() == 1


def test_a_worker_that_sends_itself_ticks_sees_that_the_broker_is_full(url: str, broker: redis.Redis, tmp_path: Path):
    ticks = TickSender(at(url, tmp_path), QUEUE)
    broker.config_set("maxmemory", 1)
    assert not ticks.send()
    assert ticks.waiting() == 0


def test_a_worker_that_sends_itself_ticks_sees_that_the_broker_is_away(tmp_path: Path):
    ticks = TickSender(away(tmp_path), QUEUE)
    assert not ticks.send()
    assert ticks.waiting() is None


def test_no_dispatch_fails_where_the_broker_is_full_or_away(url: str, broker: redis.Redis, tmp_path: Path):
    broker.config_set("maxmemory", 1)
    for celery in (at(url, tmp_path), away(tmp_path)):
        Dispatcher(celery).send("forward", "session:train:0:1", "session:train:0", "train.base")
        Dispatcher(celery).wake(Holder("base", "a"))


def test_a_call_waits_less_than_a_second_for_a_broker_that_is_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    slept: list[float] = []
    monkeypatch.setattr("kombu.utils.functional.sleep", slept.append)
    Dispatcher(away(tmp_path)).send("forward", "session:train:0:1", "session:train:0", "train.base")
    assert sum(slept) < 1


def test_a_message_is_acknowledged_although_its_connection_fell_silent(url: str, broker: redis.Redis, tmp_path: Path):
    """Otherwise it counts as prefetched for ever, and its consumer reads no other one."""
    with Proxy(url) as proxy:
        celery = at(proxy.url, tmp_path)
        assert TickSender(celery, QUEUE).send()
        with celery.connection_for_read() as connection:
            message = celery.amqp.queues.new_missing(QUEUE)(connection.default_channel).get()
            proxy.silence()
            message.ack()
            assert message.acknowledged


def test_a_consumer_whose_broadcasts_lose_their_connection_hears_of_it_and_does_not_wait(
    url: str, broker: redis.Redis, tmp_path: Path
):
    with at(url, tmp_path).connection_for_read() as connection:
        channel = connection.default_channel
        news = Queue("news", Exchange("news", "fanout"), channel=channel)
        with Consumer(channel, [news]), ThreadPoolExecutor() as other:
            connection.drain_events(timeout=5)  # the broker's answer to the subscription
            assert broker.execute_command("CLIENT KILL TYPE pubsub") == 1
            reading = other.submit(connection.drain_events, timeout=10)
            try:
                assert isinstance(reading.exception(timeout=30), connection.connection_errors)
            finally:
                broker.execute_command("CLIENT KILL TYPE normal")  # a thread that waits ends
