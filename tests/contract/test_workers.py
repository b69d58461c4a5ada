"""Workers that hang, take no tasks, or get a signal to stop. Leases and redispatch are too slow here to help."""

from __future__ import annotations

import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celery
import numpy as np
import psutil
import pytest
import tinker

from app import dispatch
from app.domain.records import Worker
from app.stores.redis import keys
from app.stores.redis.records import RedisRecords, load
from tests.contract.data import ADAM, logprobs, supervised, train
from tests.contract.stack import BASE, Stack, running
from tests.contract.test_restart import await_true, children, undisturbed
from tests.servers import free_port

HEALTHY_S = 12.0
# A worker may finish all its work before it handles the stop signal.
TRIES = 5


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, base_path: Path) -> Iterator[Stack]:
    """Two trainers."""
    folder = tmp_path_factory.mktemp("pair") / "data"
    engine = f"[engine]\nlease_s = 3600.0\nring_again_s = 3600.0\nhealthy_s = {HEALTHY_S}"
    trainer = 'backend = "torch"\ncount = 2'
    stack = Stack(
        folder, base_path, free_port(), trainer, 'backend = "transformers"', engine, "tests.warm_workers", threads=1
    )
    with running(stack):
        yield stack


@pytest.fixture
def service(pair: Stack) -> Iterator[tinker.ServiceClient]:
    await_true(lambda: len(healthy_trainers(pair)) == 2)
    with pair.client() as client:
        yield client


def trainers(stack: Stack) -> dict[str, Worker]:
    """Trainers by node."""
    with stack.redis() as client:
        workers = {node: load(Worker, fields) for node, fields in RedisRecords(client).list(Worker.namespace)}
    return {node: worker for node, worker in workers.items() if worker.role == "trainer"}


def healthy_trainers(stack: Stack) -> list[str]:
    return [node for node, worker in trainers(stack).items() if worker.healthy]


def owner(stack: Stack, model_id: str) -> str:
    with stack.redis() as client:
        held = client.get(keys.lease(model_id))
    return held.decode().rpartition("/")[0] if held else ""


def is_anew(stack: Stack, node: str, started: float) -> bool:
    """Tells if the node runs, and was started after that time."""
    now = trainers(stack).get(node)
    return now is not None and now.healthy and now.started > started


def process(stack: Stack, node: str) -> psutil.Process:
    [found] = children(stack, node.partition("@")[0])
    return found


def is_ready(stack: Stack) -> bool:
    try:
        with urllib.request.urlopen(f"{stack.url}/readyz", timeout=240) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        return False


def test_idle_trainers_share_new_models(service: tinker.ServiceClient, pair: Stack):
    models = [service.create_lora_training_client(base_model=BASE, rank=4).result().model_id for _ in range(4)]
    assert {owner(pair, model_id) for model_id in models} == set(trainers(pair))


def test_what_a_stopping_trainer_leaves_the_other_one_does_at_once(service: tinker.ServiceClient, pair: Stack):
    client = service.create_lora_training_client(base_model=BASE, rank=4, seed=5).result()
    for steps in range(6, 6 * TRIES, 6):
        train(client, 2)
        node = owner(pair, client.model_id)
        started, stopping = trainers(pair)[node].started, process(pair, node)
        pending = [(client.forward_backward(supervised(), "cross_entropy"), client.optim_step(ADAM)) for _ in range(4)]
        stopping.send_signal(signal.SIGTERM)
        left = pair.applied(client.model_id) < 2 * steps
        assert all(forward.result() and step.result() for forward, step in pending)
        if left:
            break
        await_true(lambda node=node, started=started: is_anew(pair, node, started))
    assert left, "it had done it all, every time"
    found = logprobs(client.forward(supervised(seed=8), "cross_entropy").result())
    assert owner(pair, client.model_id) not in (node, "")
    assert np.array_equal(found, undisturbed(service, steps))


def test_an_unresponsive_trainer_is_recognized_and_restarted_and_its_models_go_on(
    service: tinker.ServiceClient, pair: Stack
):
    expected = undisturbed(service, 3)
    client = service.create_lora_training_client(base_model=BASE, rank=4, seed=5).result()
    train(client, 2)
    node = owner(pair, client.model_id)
    started = trainers(pair)[node].started
    control = celery.Celery(broker=pair.settings().broker_url, set_as_current=False).control
    for queue in (dispatch.train_queue(BASE), dispatch.direct_queue(dispatch.train_queue(BASE), node)):
        assert control.cancel_consumer(queue, destination=[node], reply=True, timeout=240, limit=1)
    pending = client.forward_backward(supervised(), "cross_entropy"), client.optim_step(ADAM)
    # It ends soon after it is recognised.
    await_true(lambda: node not in healthy_trainers(pair) or is_anew(pair, node, started))
    assert all(future.result() for future in pending)
    found = logprobs(client.forward(supervised(seed=8), "cross_entropy").result())
    assert np.array_equal(found, expected)
    await_true(lambda: len(healthy_trainers(pair)) == 2)
    assert trainers(pair)[node].started > started


def test_ticks_are_no_events(service: tinker.ServiceClient, pair: Stack):
    """Otherwise Flower would show little else, and forget the futures."""
    seen: list[str] = []
    app = celery.Celery(broker=pair.settings().broker_url, set_as_current=False)
    client = service.create_lora_training_client(base_model=BASE, rank=4).result()

    def note(event: dict[str, Any]) -> None:
        seen.append(event.get("name") or event["type"])
        if seen.count("worker-heartbeat") == 20:  # one every two seconds from each of three workers
            train(client, 1)
        receiver.should_stop = "tinsmith.optim_step" in seen

    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": note})
        receiver.capture(limit=None, timeout=240)
    assert dispatch.TICK not in seen
    assert not any(name.startswith("task-") and "tick" in name for name in seen)


def test_readiness_lapses_with_stopped_trainers_and_comes_back_with_them(service: tinker.ServiceClient, pair: Stack):
    assert is_ready(pair)
    before = {node: worker.started for node, worker in trainers(pair).items()}
    stopped = [process(pair, node) for node in before]
    for trainer in stopped:
        trainer.suspend()
    await_true(lambda: not trainers(pair) and not is_ready(pair))
    for trainer in stopped:
        trainer.resume()
    await_true(lambda: is_ready(pair) and len(healthy_trainers(pair)) == 2)
    assert {node: worker.started for node, worker in trainers(pair).items()} == before, "it was no reason to end"
