"""R17 and R10 on production processes: connections drop, and a worker is killed in the middle of an Op."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import tinker

from app.stack.supervisor import SETUP_ERROR_CODE
from app.stores.redis import keys
from app.stores.redis.client import connect
from tests.contract.data import ADAM, datum, logprobs, sentences, supervised, train
from tests.faults.proxy import Proxy
from tests.faults.stack import BASE, Stack
from tests.faults.world import await_true
from tests.servers import start_valkey
from tests.servers_s3 import start_s3

DROPS = 50
SEED = 7
# On a busy machine an Op may be over before the test sees that it has begun.
TRIES = 5


@pytest.fixture(scope="module")
def broker_server(memory: Path) -> Iterator[str]:
    with start_valkey(memory / "broker") as url:
        yield url


@pytest.fixture(scope="module")
def state(valkey: str) -> Iterator[Proxy]:
    with Proxy(valkey) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def broker(broker_server: str) -> Iterator[Proxy]:
    with Proxy(broker_server) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def stack(memory: Path, base_path: Path, valkey: str, state: Proxy, broker: Proxy) -> Iterator[Stack]:
    with connect(valkey) as client:
        client.flushall()  # the other modules' worlds had another object store
    stack = Stack(memory / "stack", base_path, state.url, broker.url, valkey)
    try:
        yield stack
    finally:
        stack.stop()


@pytest.fixture
def service(stack: Stack) -> Iterator[tinker.ServiceClient]:
    with stack.sdk() as client:
        yield client


def new_model(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model=BASE, rank=4, seed=5).result()


def applied(stack: Stack, client: tinker.TrainingClient) -> int:
    return int(stack.client.hget(keys.model(client.model_id), "applied") or 0)


def outcome(client: tinker.TrainingClient) -> np.ndarray:
    return logprobs(client.forward(supervised(seed=8), "cross_entropy").result())


def test_no_dropped_connection_loses_or_doubles_an_op_or_leaves_a_worker_unresponsive(
    service: tinker.ServiceClient, stack: Stack, state: Proxy, broker: Proxy
):
    client = new_model(service)
    over = threading.Event()
    dropper = threading.Thread(target=drop, args=(state, broker, over))
    before = state.dropped + broker.dropped
    dropper.start()
    steps = 0
    while not over.is_set():
        train(client, 2)
        steps += 2
    dropper.join()
    print(f"seed {SEED}: {state.dropped + broker.dropped - before} connections dropped, {steps} steps")
    train(client, 2)  # no worker is unresponsive
    found = outcome(client)
    admitted = 2 * (steps + 2) + 2  # with create_model, and the forward of the outcome
    assert applied(stack, client) == admitted - 1
    assert stack.trainer.is_alive(), "the worker lived through it"
    calm = new_model(service)
    train(calm, steps + 2)
    assert np.array_equal(found, outcome(calm))


def drop(state: Proxy, broker: Proxy, over: threading.Event) -> None:
    dice = random.Random(SEED)
    for i in range(DROPS):
        over.wait(dice.uniform(0.05, 0.5))
        (state, broker)[i % 2].drop()
    over.set()


def test_a_worker_killed_in_the_middle_of_an_op_loses_nothing(service: tinker.ServiceClient, stack: Stack):
    """Kills the worker like the kernel does when memory runs out."""
    long = [datum(tokens) for tokens in sentences(64, length=400)]
    client = new_model(service)
    train(client, 2)
    steps = 0
    hit = False
    while not hit:
        assert steps < TRIES, "it was never in the middle of one"
        seq = 5 + 2 * steps
        pending = client.forward_backward(long, "cross_entropy")
        steps += 1
        hit = kill_in(stack, client, seq)
        stack.trainer = stack.start_trainer()
        assert pending.result()
        # The step may be followed by a snapshot, which trims the journal.
        attempts = int(stack.client.hget(keys.op(f"{client.model_id}:{seq}"), "attempts"))
        assert client.optim_step(ADAM).result()
    assert attempts == 1, "one crash"
    found = outcome(client)
    calm = new_model(service)
    train(calm, 2)
    for _ in range(steps):
        train(calm, 1, long)
    assert np.array_equal(found, outcome(calm))


def kill_in(stack: Stack, client: tinker.TrainingClient, seq: int) -> bool:
    """Tells if the trainer died in the middle of the Op."""
    op = keys.op(f"{client.model_id}:{seq}")
    await_true(lambda: stack.client.hget(op, "runner") or applied(stack, client) >= seq, "the worker begins on it")
    stack.trainer.kill()
    stack.trainer.join()
    return applied(stack, client) == seq - 1


def test_a_worker_asked_to_end_does_not_wait_for_a_save_that_hangs(memory: Path, base_path: Path):
    """The worker's successor writes the save, and the failure does not count against it.

    The test uses separate servers, because the other stack's trainer listens on the shared ones.
    """
    with start_s3(memory / "s3-celery") as store, Proxy(store.url) as far, ExitStack() as running:
        settings = {**store.model_dump(), "url": far.url}
        state, broker = (
            running.enter_context(start_valkey(memory / name)) for name in ("saving-state", "saving-broker")
        )
        stack = Stack(memory / "saving", base_path, state, broker, state, settings)
        running.callback(stack.stop)
        service = running.enter_context(stack.sdk())
        client = new_model(service)
        train(client, 1)
        far.stall()
        pending = [client.save_state("kept"), *(client.optim_step(ADAM) for _ in range(2))]
        save, last = (keys.op(f"{client.model_id}:{seq}") for seq in (3, 5))
        await_true(lambda: stack.client.hget(last, "runner"), "the steps behind the save have begun")
        stack.trainer.terminate()
        stack.trainer.join(100)  # the store's limit is 180
        assert not stack.trainer.is_alive()
        assert stack.client.hget(save, "runner") is None, "it was left in order"
        assert stack.client.hget(save, "attempts") == b"0"
        far.go_on()
        stack.trainer = stack.start_trainer()
        assert all(future.result() for future in pending)


def test_a_second_worker_of_the_same_name_is_refused_and_the_first_goes_on(stack: Stack, service: tinker.ServiceClient):
    client = new_model(service)
    train(client, 1)
    epoch = stack.client.hget(keys.model(client.model_id), "epoch")
    second = stack.start_trainer()
    second.join(120)
    assert second.exitcode == SETUP_ERROR_CODE
    train(client, 1)
    assert stack.client.hget(keys.model(client.model_id), "epoch") == epoch
    assert stack.trainer.is_alive()
