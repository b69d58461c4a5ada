"""Full fine-tuning through the SDK, requested by a LoRA rank of 0: train, save, resume, download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.contract.data import ADAM, datum, logprobs, sentences, supervised, train
from tests.contract.stack import BASE, Stack, download_model

pytestmark = pytest.mark.parametrize("stack", ["deepspeed-1-transformers"], indirect=True)


@pytest.fixture
def full(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model=BASE, rank=0).result()


def test_a_full_model_is_named_as_one_and_learns(full: tinker.TrainingClient) -> None:
    assert full.get_info().is_lora is False
    losses = train(full, 4)
    assert losses[-1] < 0.7 * losses[0]
    stepped = full.optim_step(ADAM).result()
    assert stepped.metrics is not None
    assert stepped.metrics["param_norm"] > 0


def test_a_run_resumed_from_its_checkpoint_goes_on_bit_for_bit(
    service: tinker.ServiceClient, full: tinker.TrainingClient
) -> None:
    train(full, 2)
    path = full.save_state("half-way").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert resumed.get_info().is_lora is False
    assert train(resumed, 2) == train(full, 2)


def test_two_full_models_that_alternate_are_as_each_alone(service: tinker.ServiceClient) -> None:
    """One trainer holds one of the models at a time."""
    alone, one, two = (service.create_lora_training_client(base_model=BASE, rank=0).result() for _ in range(3))
    wanted = [train(alone, 1)[0] for _ in range(2)]
    found: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(2):
        for i, client in enumerate((one, two)):
            found[i] += train(client, 1)
    assert found == {0: wanted, 1: wanted}


def test_the_downloaded_model_scores_as_the_trainer_does(
    full: tinker.TrainingClient, stack: Stack, base_path: Path, tmp_path: Path
) -> None:
    train(full, 2)
    model = AutoModelForCausalLM.from_pretrained(download_model(full, stack, tmp_path), dtype=torch.float32).eval()
    tokens = sentences(1)[0]
    with torch.no_grad():
        scores = model(torch.tensor([tokens])).logits.log_softmax(-1)[0]
    expected = [float(scores[i, token]) for i, token in enumerate(tokens[1:])]
    found = logprobs(full.forward([datum(tokens)], "cross_entropy").result())
    np.testing.assert_allclose(found[:-1], expected, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path)("abc") == AutoTokenizer.from_pretrained(base_path)("abc")


def test_adapters_are_trained_beside_it(
    full: tinker.TrainingClient, training: tinker.TrainingClient, stack: Stack
) -> None:
    losses = [
        client.forward_backward(supervised(), "cross_entropy").result().metrics["loss:sum"]
        for client in (full, training)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert {worker.role for worker in stack.workers()} == {"trainer", "full_trainer", "sampler", "full_sampler"}
