"""Sampling from full fine-tunes through the SDK: the calls are those for adapters, and no other tenant is disturbed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

from tests.contract.data import datum, logprobs, sentences, train
from tests.contract.stack import BASE, Stack, download_model

pytestmark = pytest.mark.parametrize("stack", ["deepspeed-1-transformers"], indirect=True)

PROMPT = sentences(1)[0]
GREEDY = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
Sampled = tuple[list[int], list[float]]


@pytest.fixture
def full(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model=BASE, rank=0).result()


def greedy(client: tinker.SamplingClient) -> Sampled:
    prompt = types.ModelInput.from_ints(PROMPT)
    (sequence,) = client.sample(prompt, num_samples=1, sampling_params=GREEDY).result().sequences
    return list(sequence.tokens), list(sequence.logprobs or [])


def newest(full: tinker.TrainingClient) -> tinker.SamplingClient:
    return full.save_weights_and_get_sampling_client().result()


def test_it_samples_what_was_trained(full: tinker.TrainingClient, stack: Stack, tmp_path: Path) -> None:
    """Logprobs are those of the trainer; tokens are those of plain transformers on the downloaded model."""
    train(full, 3)
    tokens, scores = greedy(newest(full))
    trained = logprobs(full.forward([datum(PROMPT + tokens)], "cross_entropy").result())
    np.testing.assert_allclose(scores, trained[len(PROMPT) - 1 :][: len(tokens)], atol=1e-3)
    model = AutoModelForCausalLM.from_pretrained(download_model(full, stack, tmp_path), dtype=torch.float32)
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([PROMPT])
    drawn = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8)
    assert tokens == drawn[0, len(PROMPT) :].tolist()


def test_new_weights_are_read_from_shared_memory_without_a_copy(full: tinker.TrainingClient, stack: Stack) -> None:
    train(full, 1)
    greedy(newest(full))
    fetched = (stack.data_dir / "cache").rglob("model*.safetensors")
    assert [path for path in fetched if full.get_info().model_id in str(path)] == []


def test_snapshots_stay_as_they_were_however_often_they_take_turns(full: tinker.TrainingClient) -> None:
    snapshots, wanted = [], []
    for _ in range(2):
        train(full, 1)
        snapshots.append(newest(full))
        wanted.append(greedy(snapshots[-1]))
    assert wanted[0][1] != wanted[1][1]
    train(full, 1)
    assert [greedy(snapshot) for snapshot in snapshots * 3] == wanted * 3
    sent = [
        snapshot.sample(types.ModelInput.from_ints(PROMPT), num_samples=2, sampling_params=GREEDY)
        for snapshot in snapshots * 6
    ]
    found = [[list(sequence.tokens) for sequence in future.result().sequences] for future in sent]
    assert found == [[tokens, tokens] for tokens, _ in wanted] * 6


def test_a_saved_one_is_sampled_by_its_path(service: tinker.ServiceClient, full: tinker.TrainingClient) -> None:
    train(full, 2)
    wanted = greedy(newest(full))
    path = full.save_weights_for_sampler("kept").result().path
    train(full, 1)
    by_path = service.create_sampling_client(model_path=path).result()
    assert by_path.get_base_model() == BASE
    assert greedy(by_path) == wanted


def test_samples_of_other_models_do_not_change(
    service: tinker.ServiceClient, full: tinker.TrainingClient, training: tinker.TrainingClient
) -> None:
    train(training, 2)
    others = [service.create_sampling_client(base_model=BASE).result(), newest(training)]
    before = [greedy(client) for client in others]
    for _ in range(2):
        train(full, 1)
        tokens_and_scores = greedy(newest(full))
        assert tokens_and_scores not in before
        assert [greedy(client) for client in others] == before


def test_clients_of_weights_in_flight_follow_the_newest(full: tinker.TrainingClient) -> None:
    clients, seen = [], []
    for _ in range(2):
        train(full, 1)
        clients.append(full.save_weights_and_get_sampling_client(kind="inflight").result())
        found = [greedy(client) for client in clients]
        assert all(each == found[0] for each in found)
        seen.append(found[0])
    assert seen[0][1] != seen[1][1]
