"""A stack on a GPU under the real SDK, while its trainers are killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import numpy as np
import pytest
import tinker
from tinker import types

from tests.contract.data import logprobs, supervised, train
from tests.contract.stack import BASE, Stack
from tests.contract.test_restart import children
from tests.models import tiny_qwen3
from tests.servers import free_port

_SHARED = "memory_share = 0.3"
PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    base = tiny_qwen3(folder / "base")
    trainer, sampler = f'backend = "deepspeed"\n{_SHARED}', f'backend = "transformers"\n{_SHARED}'
    stack = Stack(folder / "data", base, free_port(), trainer=trainer, sampler=sampler)
    stack.start()
    yield stack
    assert stack.stop() == 0


def _client(stack: Stack) -> tinker.TrainingClient:
    return stack.client().create_lora_training_client(base_model=BASE, rank=8, seed=5).result()


def test_trainer_and_sampler_are_on_a_gpu(stack: Stack) -> None:
    """They share it if there is one alone, and it may have any number (CUDA_VISIBLE_DEVICES)."""
    found = {worker.role: worker.describe["devices"] for worker in stack.workers()}
    assert found.keys() == {"trainer", "sampler"}
    assert all(len(devices) == 1 and devices[0].startswith("cuda:") for devices in found.values()), found


def test_killed_trainers_lose_and_double_no_step(stack: Stack) -> None:
    """A GPU does not repeat its bits. One step more or less changes these losses by a tenth and more."""
    expected = train(_client(stack), 8)
    assert expected[-1] < 0.5 * expected[0]
    client, found = _client(stack), []
    for _ in range(4):
        found += train(client, 2)
        for trainer in children(stack, "trainer-"):
            trainer.send_signal(signal.SIGKILL)
    np.testing.assert_allclose(found, expected, rtol=0.01)


def test_the_sampler_has_the_trained_weights(stack: Stack) -> None:
    client = _client(stack)
    train(client, 4)
    datum = supervised(count=1)[0]
    wanted = logprobs(client.forward([datum], "cross_entropy").result())
    sampler = client.save_weights_and_get_sampling_client().result()
    found = sampler.compute_logprobs(types.ModelInput.from_ints(datum.model_input.to_ints())).result()
    np.testing.assert_allclose([float(one) for one in found[1:] if one is not None], wanted[:-1], atol=1e-3)
