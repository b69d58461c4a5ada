"""The host of a server loses its power: its connections fall silent, and new ones work. Nobody waits for the dead ones
for longer than a lease.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
import urllib3

from app.domain.records import Model
from app.settings import EngineSettings, StoreSettings
from app.stores.objects import s3
from app.stores.redis import client, keys
from app.stores.redis.client import Waiter, connect, connect_state
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import dump
from app.stores.redis.types import Lease
from tests.contract.data import train
from tests.faults.proxy import Proxy
from tests.faults.stack import BASE, Stack
from tests.faults.world import await_true
from tests.servers import start_valkey
from workers.process.liveness import LeaseKeeper

MODEL = "session:train:0"
NEVER = 600.0
LEASE_S = EngineSettings().lease_s
# A dead machine, or a live one whose process does not go on.
SILENT = pytest.mark.parametrize("acknowledge", [False, True], ids=["dead", "stopped"])


@pytest.fixture
def state(memory: Path) -> Iterator[str]:
    """A state server of their own, on which no other worker runs maintenance."""
    with start_valkey(memory / "silent-state") as url:
        with connect(url) as client:
            client.flushall()
        yield url


@SILENT
def test_a_lease_never_lapses_when_the_connection_falls_silent(state: str, acknowledge: bool):
    with Proxy(state) as proxy, connect(state) as near, connect_state(proxy.url) as far:
        oplog = RedisOpLog(far, EngineSettings())
        assert oplog.create_model(MODEL, dump(Model("me", "session", "base", 0.0)))
        assert isinstance(oplog.acquire(MODEL, "a/1"), Lease)
        keeper = LeaseKeeper(oplog, "a/1", LEASE_S)
        keeper.add(MODEL, time.monotonic())
        await_renewal(lambda: near.pttl(keys.lease(MODEL)))  # right after it, the longest time until the next one
        proxy.silence(acknowledge=acknowledge)
        assert proxy.silenced
        await_renewal(lambda: near.pttl(keys.lease(MODEL)))
        assert keeper.holds(MODEL)
        keeper.stop()


def await_renewal(left_ms: Callable[[], int]) -> None:
    """Waits until the time left of the lease grows. Fails when the lease lapses before."""
    before = left_ms()
    while (left := left_ms()) <= before:
        assert left > 0, "the lease lapsed"
        before = left
        time.sleep(0.02)


def test_a_dead_connection_ends_before_its_answer_is_due(state: str, monkeypatch: pytest.MonkeyPatch):
    """The kernel finds the peer dead; the time for an answer, an hour here, plays no part."""
    monkeypatch.setattr(client, "ANSWER_S", 3600.0)
    with Proxy(state) as proxy, connect_state(proxy.url) as far:
        assert far.ping()
        proxy.silence()
        failed: list[redis.RedisError] = []
        caller = threading.Thread(target=lambda: failed.append(_error(far)), daemon=True)
        caller.start()
        caller.join(60)
        assert failed
        assert far.ping()


def _error(far: redis.Redis) -> redis.RedisError:
    with pytest.raises(redis.RedisError) as caught:
        far.ping()
    return caught.value


@SILENT
def test_a_poll_whose_connection_fell_silent_is_woken_and_hears_later_results(state: str, acknowledge: bool):
    with Proxy(state) as proxy, connect(state) as near:
        waiter = Waiter(connect_state(proxy.url))
        assert waiter._done.listening.wait(60)
        held = threading.Thread(target=waiter.wait, args=("a", NEVER, lambda: False), daemon=True)
        held.start()
        await_true(lambda: waiter._callbacks, "the poll is held")
        proxy.silence(acknowledge=acknowledge)
        held.join(60)
        assert not held.is_alive(), "it looks again whether its result is there"
        await_true(waiter._done.listening.is_set, "the channel is back")
        later = threading.Thread(target=waiter.wait, args=("b", NEVER, lambda: False), daemon=True)
        later.start()
        await_true(lambda: near.publish(keys.DONE_CHANNEL, "b") and not later.is_alive(), "a later result wakes")


def test_a_store_whose_connections_fell_silent_is_read_on_a_new_one(
    server: StoreSettings, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(s3, "_TIMEOUT", urllib3.Timeout(connect=3, read=NEVER))
    with Proxy(server.url) as proxy:
        store = s3.S3Store(server.model_copy(update={"url": proxy.url}))
        assert store.put_new("kept", b"1")
        proxy.silence()
        assert proxy.silenced
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.append(store.read("kept")), daemon=True)
        reader.start()
        reader.join(60)
        assert found == [b"1"]


@SILENT
def test_a_run_goes_on_with_its_owner_when_all_connections_fall_silent(
    memory: Path, base_path: Path, state: str, acknowledge: bool
):
    """A lease of 15 s, as in production. A trainer that did not find its broker dead in time would be restarted, and a
    lease that lapsed would change the model's epoch."""
    with ExitStack() as running:
        broker = running.enter_context(start_valkey(memory / "silent-broker", durable=False))
        proxies = [running.enter_context(Proxy(url)) for url in (state, broker)]
        folder = memory / f"silent-{acknowledge}"
        stack = Stack(folder, base_path, proxies[0].url, proxies[1].url, state, lease_s=LEASE_S)
        running.callback(stack.stop)
        training = running.enter_context(stack.sdk()).create_lora_training_client(base_model=BASE, rank=4).result()
        train(training, 1)
        epoch = stack.client.hget(keys.model(training.model_id), "epoch")
        for proxy in proxies:
            proxy.silence(acknowledge=acknowledge)
        train(training, 1)
        assert all(proxy.silenced > 2 for proxy in proxies)
        assert stack.client.hget(keys.model(training.model_id), "epoch") == epoch
        assert stack.trainer.is_alive()
