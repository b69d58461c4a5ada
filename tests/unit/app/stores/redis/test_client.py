from __future__ import annotations

import threading
import time

import pytest
import redis

from app.stores.redis import keys
from app.stores.redis.client import Channel, Waiter, connect
from tests.servers import free_port, start_valkey

NEVER = 600.0


def listening(client: redis.Redis) -> Waiter:
    """A waiter whose channel receives: the start of the channel, which wakes everybody, is over."""
    waiter = Waiter(client)
    assert waiter._done.listening.wait(60)
    return waiter


def waiting_thread(waiter: Waiter, request_id: str, check=lambda: False) -> threading.Thread:
    registered = threading.Event()

    def check_registered() -> bool:
        registered.set()
        return check()

    thread = threading.Thread(target=waiter.wait, args=(request_id, NEVER, check_registered), daemon=True)
    thread.start()
    assert registered.wait(60)
    return thread


def test_a_publication_wakes_its_own_waiters_and_no_others(client: redis.Redis, valkey: str):
    waiter = listening(connect(valkey))
    mine, also_mine = (waiting_thread(waiter, "a") for _ in range(2))
    others, later = threading.Event(), threading.Event()
    with waiter.watch("b", others.set), waiter.watch("c", later.set):
        for id_ in "ac":
            client.publish(keys.DONE_CHANNEL, id_)
        assert later.wait(60)
        assert not others.is_set()
    mine.join(60)
    also_mine.join(60)
    assert not mine.is_alive()
    assert not also_mine.is_alive()


def test_a_result_that_was_there_before_is_not_waited_for(valkey: str):
    thread = waiting_thread(Waiter(connect(valkey)), "a", check=lambda: True)
    thread.join(60)
    assert not thread.is_alive()


def test_a_restarted_server_wakes_everybody_and_later_publications_arrive(tmp_path):
    port = free_port()
    with start_valkey(tmp_path, port) as url:
        waiter = listening(connect(url))
        held = waiting_thread(waiter, "a")
    held.join(60)
    assert not held.is_alive()
    with start_valkey(tmp_path, port) as url, connect(url) as client:
        later = waiting_thread(waiter, "b")
        deadline = time.monotonic() + 60
        while later.is_alive() and time.monotonic() < deadline:
            client.publish(keys.DONE_CHANNEL, "b")
            later.join(0.1)
        assert not later.is_alive()


def test_a_channel_logs_an_outage_once_and_ends_when_it_is_closed(tmp_path, caplog: pytest.LogCaptureFixture):
    tries = threading.Semaphore(0)
    with start_valkey(tmp_path) as url:
        channel = Channel(connect(url), "mine", lambda message: None, missed=lambda: tries.release())
        channel.start()
        assert channel.listening.wait(60)
    assert all(tries.acquire(timeout=60) for _ in range(5))
    assert (
        len(
            [
                message
                for message in caplog.messages
                if message.startswith("lost the pub/sub connection of channel mine")
            ]
        )
        == 1
    )
    [thread] = [thread for thread in threading.enumerate() if thread.name == "listening on mine"]
    channel.close()
    thread.join(60)
    assert not thread.is_alive()
