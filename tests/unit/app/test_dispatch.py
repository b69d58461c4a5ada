"""Dispatch and task events while the broker is full, down or hangs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Consumer, Exchange, Queue

from app import dispatch
from app.dispatch import App, Dispatcher, TaskEvents, TickSender, celery_app
from app.settings import RedisSettings, Settings
from app.stores.redis.client import connect
from app.stores.redis.types import Holder
from tests.faults.proxy import Proxy
from tests.servers import free_port, start_valkey
from tests.tls import tls_in_front, write_certificate

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


def at(url: str, tmp_path: Path) -> App:
    return celery_app(Settings(data_dir=tmp_path, redis=RedisSettings(url=url)))


def away(tmp_path: Path) -> App:
    return at(f"redis://127.0.0.1:{free_port()}/0", tmp_path)


def test_the_name_of_a_queue_tells_its_work():
    name = "Qwen/Qwen3-0.6B"
    for full in (False, True):
        assert dispatch.parse_queue(dispatch.train_queue(name, full=full)) == (False, full, name)
        assert dispatch.parse_queue(dispatch.sample_queue(name, full=full)) == (True, full, name)
    assert dispatch.parse_queue("celery") is None


def test_a_worker_that_sends_itself_ticks_knows_what_waits(url: str, broker: redis.Redis, tmp_path: Path):
    ticks = TickSender(at(url, tmp_path), QUEUE)
    assert ticks.waiting() == 0
    assert ticks.send()
    assert ticks.waiting() == 1


def test_over_tls_a_certificate_that_is_not_trusted_is_refused_before_the_password_is_sent(
    url: str, broker: redis.Redis, tmp_path: Path
):
    certificate = write_certificate(tmp_path)
    with tls_in_front(int(url.rpartition(":")[2].partition("/")[0]), certificate) as (port, seen):
        place = f"rediss://:secret@127.0.0.1:{port}/0"
        before = _connections(broker)
        sent(Dispatcher(at(place, tmp_path)), "m:0")
        assert seen and all(seen)
        assert _connections(broker) == before
        trusted = at(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}", tmp_path)
        sent(Dispatcher(trusted), "m:0")
        assert has(trusted, "m:0")


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


def test_a_trainer_with_an_unread_message_gets_no_further_tick_and_one_client_asks(
    url: str, broker: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Otherwise a tenant could fill its queue and the broker with calls that cost nothing, such as unload_model."""
    ticks, made = TickSender(at(url, tmp_path), QUEUE), list[str]()
    dispatcher, holder = Dispatcher(at(url, tmp_path)), Holder("base", "a")
    monkeypatch.setattr(dispatch, "connect", lambda url: (made.append(url), connect(url))[1])
    for _ in range(3):
        dispatcher.wake(holder)
    assert ticks.waiting() == 1
    broker.flushall()
    dispatcher.wake(holder)
    assert ticks.waiting() == 1
    assert len(made) == 1


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that does not answer for a second hangs, and a dispatcher rests for a minute after that."""
    for name, seconds in (("ANSWER_S", 1.0), ("_HANGS_S", 0.5), ("_REST_S", 60.0)):
        monkeypatch.setattr(dispatch, name, seconds)


def sent(dispatcher: Dispatcher, request_id: str) -> None:
    dispatcher.send("forward", request_id, "session:train:0", "train.base")


def has(celery: App, request_id: str) -> bool:
    with connect(celery.redis_url) as broker:
        return any(f'"{request_id}"'.encode() in message for message in broker.lrange("train.base", 0, -1))


def send_at_once(dispatcher: Dispatcher, count: int) -> None:
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda seq: sent(dispatcher, f"n:{seq}"), range(count)))


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith("could not dispatch")]


@pytest.mark.usefixtures("hasty")
def test_only_the_first_calls_wait_for_a_broker_that_hangs(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Otherwise each admission waits, for up to 20 s."""
    with Proxy(url) as proxy:
        proxy.stall()
        dispatcher = Dispatcher(at(proxy.url, tmp_path))
        for seq in range(3):
            sent(dispatcher, f"m:{seq}")
            dispatcher.wake(Holder("base", "a"))
        assert len(failures(caplog)) == 1


@pytest.mark.usefixtures("hasty")
def test_after_a_rest_one_call_tries_the_hanging_broker_and_the_others_go_on(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with Proxy(url) as proxy:
        proxy.stall()
        dispatcher = Dispatcher(at(proxy.url, tmp_path))
        monkeypatch.setattr(dispatch, "_REST_S", 0.0)
        sent(dispatcher, "m:0")
        monkeypatch.setattr(dispatch, "_REST_S", 60.0)
        send_at_once(dispatcher, 8)
        assert len(failures(caplog)) == 2


@pytest.mark.usefixtures("hasty")
def test_dispatches_go_out_again_once_one_has_reached_the_broker(
    url: str, broker: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with Proxy(url) as proxy:
        proxy.stall()
        celery = at(proxy.url, tmp_path)
        dispatcher = Dispatcher(celery)
        monkeypatch.setattr(dispatch, "_REST_S", 0.0)
        sent(dispatcher, "m:0")
        proxy.go_on()
        monkeypatch.setattr(dispatch, "_REST_S", 60.0)
        for request_id in ("m:1", "m:2"):
            sent(dispatcher, request_id)
            assert has(celery, request_id)


def test_a_dispatch_that_began_before_the_broker_was_back_stops_no_later_one(
    url: str, broker: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dispatch, "_HANGS_S", 0.0)
    monkeypatch.setattr(dispatch, "_REST_S", 60.0)
    celery, publish = at(url, tmp_path), dispatch._publish
    dispatcher = Dispatcher(celery)
    hangs, back = threading.Event(), threading.Event()

    def cut_off(*args: Any) -> None:
        if args[1] == "m:0":
            hangs.set()
            back.wait(60)
            raise redis.TimeoutError
        publish(*args)

    monkeypatch.setattr(dispatch, "_publish", cut_off)
    first = threading.Thread(target=sent, args=(dispatcher, "m:0"))
    first.start()
    assert hangs.wait(60)
    sent(dispatcher, "m:1")
    back.set()
    first.join()
    sent(dispatcher, "m:2")
    assert has(celery, "m:1") and has(celery, "m:2")


def test_a_broker_that_refused_a_message_at_once_gets_the_next_one(
    url: str, broker: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dispatch, "_HANGS_S", 60.0)  # a slow machine is no hanging broker
    celery = at(url, tmp_path)
    dispatcher = Dispatcher(celery)
    broker.config_set("maxmemory", 1)
    sent(dispatcher, "m:0")
    broker.config_set("maxmemory", 0)
    sent(dispatcher, "m:1")
    assert has(celery, "m:1")


@pytest.mark.usefixtures("hasty")
def test_calls_that_wait_for_a_connection_give_up_while_those_that_have_one_hang(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Otherwise they get it one after the other, and each hangs as long."""
    monkeypatch.setattr(dispatch, "_MOST_AT_ONCE", 1)
    with Proxy(url) as proxy:
        proxy.stall()
        send_at_once(Dispatcher(at(proxy.url, tmp_path)), 8)
        assert len([line for line in failures(caplog) if "other messages wait" not in line]) == 1


def test_a_dispatch_goes_out_although_its_connection_fell_silent(url: str, broker: redis.Redis, tmp_path: Path):
    """Otherwise it waits for the redispatch task."""
    with Proxy(url) as proxy:
        ticks = TickSender(at(proxy.url, tmp_path), QUEUE)
        assert ticks.send()
        proxy.silence()
        assert ticks.send()
    assert TickSender(at(url, tmp_path), QUEUE).waiting() == 2


def test_a_dispatch_makes_no_client_of_its_own(
    url: str, broker: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One costs as much as the message's round trip."""
    ticks = TickSender(at(url, tmp_path), QUEUE)
    assert ticks.send()
    made: list[object] = []
    before = redis.Redis.__init__

    def counted(self: redis.Redis, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        before(self, *args, **kwargs)

    monkeypatch.setattr(redis.Redis, "__init__", counted)
    assert ticks.send()
    assert made == []


def test_a_message_in_hand_is_known_to_its_worker_alone(url: str, broker: redis.Redis, tmp_path: Path):
    """A note at the broker costs each future two round trips, and no recovery needs it."""
    celery = at(url, tmp_path)
    TickSender(celery, QUEUE).send()
    with celery.connection_for_read() as connection:
        message = celery.amqp.queues.new_missing(QUEUE)(connection.default_channel).get()
        changed = _changes(broker)
        message.ack()
        assert message.acknowledged
        assert _changes(broker) == changed
        assert connect(celery.redis_url).keys("*unacked*") == []


def test_a_worker_that_stops_gives_back_the_messages_in_hand(url: str, broker: redis.Redis, tmp_path: Path):
    celery = at(url, tmp_path)
    ticks = TickSender(celery, QUEUE)
    ticks.send()
    with celery.connection_for_read() as connection:
        celery.amqp.queues.new_missing(QUEUE)(connection.default_channel).get()
        assert ticks.waiting() == 0
    assert ticks.waiting() == 1


def test_a_broker_that_hangs_is_asked_once_to_take_messages_back(
    url: str, broker: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Otherwise a consumer waits for it once for each message, and leaves a file."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Proxy(url) as proxy:
        celery = at(proxy.url, tmp_path)
        ticks = TickSender(celery, QUEUE)
        for _ in range(3):
            ticks.send()
        with celery.connection_for_read() as connection:
            channel, asked = connection.default_channel, []
            for _ in range(3):
                celery.amqp.queues.new_missing(QUEUE)(channel).get()

            def refuse(*message: object) -> None:
                asked.append(message)
                raise redis.TimeoutError

            monkeypatch.setattr(channel, "_put", refuse)
    assert len(asked) == 1
    assert list(tmp_path.iterdir()) == []


def _connections(broker: redis.Redis) -> int:
    return int(broker.info("stats")["total_connections_received"])


def _changes(broker: redis.Redis) -> int:
    """The changes of data since the server's last save to disk, which it does not do here."""
    return int(broker.info("persistence")["rdb_changes_since_last_save"])


def test_a_consumer_whose_broadcasts_lose_their_connection_hears_of_it_and_does_not_wait(
    url: str, broker: redis.Redis, tmp_path: Path
):
    with at(url, tmp_path).connection_for_read() as connection:
        channel = connection.default_channel
        news = Queue("news", Exchange("news", "fanout"), channel=channel)
        with Consumer(channel, [news]), ThreadPoolExecutor() as other:
            connection.drain_events(timeout=60)  # the broker's answer to the subscription
            assert broker.execute_command("CLIENT KILL TYPE pubsub") == 1
            reading = other.submit(connection.drain_events, timeout=60)
            try:
                assert isinstance(reading.exception(timeout=120), connection.connection_errors)
            finally:
                broker.execute_command("CLIENT KILL TYPE normal")  # a thread that waits ends


def test_task_events_go_on_after_any_error_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    events, tried = TaskEvents(away(tmp_path)), threading.Semaphore(0)

    def fail(_: object) -> None:
        tried.release()
        raise ValueError("nobody knows")

    monkeypatch.setattr(events, "_send", fail)
    with caplog.at_level(logging.WARNING, logger=dispatch.__name__):
        for seq in range(3):
            events.admitted(f"s:{seq}", "sample", "me")
            assert tried.acquire(timeout=30)
        events.close()
    assert [record.getMessage() for record in caplog.records] == ["task events are lost"]


def test_an_orderly_stop_does_not_wait_for_task_events_that_a_hanging_broker_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dispatch, "_MOST_EVENTS", 1)
    monkeypatch.setattr(dispatch, "_CLOSING_S", 0.05)
    events, hanging, free = TaskEvents(away(tmp_path)), threading.Event(), threading.Event()

    def hang(_: object) -> None:
        hanging.set()
        free.wait(60)

    monkeypatch.setattr(events, "_send", hang)
    events.admitted("s:0", "sample", "me")
    assert hanging.wait(30)
    events.admitted("s:1", "sample", "me")  # the queue is full
    closing = threading.Thread(target=events.close, daemon=True)
    closing.start()
    closing.join(30)
    try:
        assert not closing.is_alive()
    finally:
        free.set()


def test_events_that_wait_together_are_one_message(url: str, broker: redis.Redis, tmp_path: Path):
    events = TaskEvents(at(url, tmp_path))
    with broker.pubsub(ignore_subscribe_messages=True) as messages:
        messages.psubscribe("*celeryev*")
        messages.get_message(timeout=60)
        events._send([("task-sent", {"uuid": f"s:{seq}", "timestamp": 0.0}) for seq in range(60)])
        assert messages.get_message(timeout=60) is not None
        assert messages.get_message(timeout=0.2) is None


def test_no_file_of_the_current_folder_is_loaded_for_a_module_of_the_tasks(tmp_path, monkeypatch):
    (tmp_path / "of_the_user.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="of_the_user"):
        away(tmp_path).loader.import_task_module("of_the_user")
