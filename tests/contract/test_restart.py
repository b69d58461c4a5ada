"""Processes come and go; runs, checkpoints and keys stay."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import tinker
from tinker import types

from app.stores.redis import keys
from app.stores.redis.client import connect
from tests.contract.data import logprobs, sentences, supervised, train
from tests.contract.stack import BASE, Stack, running
from tests.servers import free_port

PROMPT = types.ModelInput.from_ints(sentences(1)[0])


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory, base_path: Path) -> Iterator[Stack]:
    """Two plain-torch trainers and the light sampler: the processes die here, not the kernels."""
    folder = tmp_path_factory.mktemp("light") / "data"
    trainer = 'backend = "torch"\ncount = 2'
    stack = Stack(folder, base_path, free_port(), trainer, 'backend = "transformers"', "[engine]\nlease_s = 3.0")
    with running(stack):
        yield stack


@pytest.fixture
def service(light: Stack) -> Iterator[tinker.ServiceClient]:
    with light.client() as client:
        yield client


def undisturbed(service: tinker.ServiceClient, steps: int) -> np.ndarray:
    client = service.create_lora_training_client(base_model=BASE, rank=4, seed=5).result()
    train(client, steps)
    return logprobs(client.forward(supervised(seed=8), "cross_entropy").result())


def children(stack: Stack, words: str) -> list[psutil.Process]:
    assert stack.process is not None
    found = psutil.Process(stack.process.pid).children(recursive=True)
    return [child for child in found if words in " ".join(child.cmdline())]


def await_true(what: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


def test_a_killed_trainer_changes_no_result(service: tinker.ServiceClient, light: Stack):
    expected = undisturbed(service, 6)
    client = service.create_lora_training_client(base_model=BASE, rank=4, seed=5).result()
    train(client, 3)
    for trainer in children(light, "workers.trainer"):
        trainer.send_signal(signal.SIGKILL)
    train(client, 3)
    found = logprobs(client.forward(supervised(seed=8), "cross_entropy").result())
    assert np.array_equal(found, expected)


def test_a_killed_sampler_loses_no_request(service: tinker.ServiceClient, light: Stack):
    client = service.create_sampling_client(base_model=BASE).result()
    params = types.SamplingParams(max_tokens=200, temperature=1.0, seed=3, stop=[])
    before = client.sample(PROMPT, 2, params).result()
    pending = [client.sample(PROMPT, 2, params) for _ in range(4)]
    for sampler in children(light, "workers.sampler"):
        sampler.send_signal(signal.SIGKILL)
    for future in pending:
        assert [s.tokens for s in future.result().sequences] == [s.tokens for s in before.sequences]


def test_lost_messages_are_rung_again(service: tinker.ServiceClient, light: Stack):
    client = service.create_lora_training_client(base_model=BASE, rank=4).result()
    trainers = children(light, "workers.trainer")
    for trainer in trainers:
        trainer.suspend()
    pending = [client.forward_backward(supervised(), "cross_entropy") for _ in range(3)]
    with light.redis() as state, connect(light.settings().broker_url) as broker:
        await_true(lambda: state.zcard(keys.journal(client.model_id)) >= 4)
        broker.flushdb()
    for trainer in trainers:
        trainer.resume()
    assert all(future.result() for future in pending)


def test_a_stack_started_again_on_its_folder_goes_on_where_it_was(light: Stack, service: tinker.ServiceClient):
    expected = undisturbed(service, 6)
    client = service.create_lora_training_client(base_model=BASE, rank=4, seed=5).result()
    train(client, 3)
    path = client.save_state("kept").result().path
    everything = [child.pid for child in children(light, "")]
    assert light.stop() == 0
    assert not [pid for pid in everything if psutil.pid_exists(pid) and _alive(pid)]
    light.start()
    train(client, 3)
    found = logprobs(client.forward(supervised(seed=8), "cross_entropy").result())
    assert np.array_equal(found, expected)
    assert service.create_training_client_from_state(path).result().get_info().lora_rank == 4


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
