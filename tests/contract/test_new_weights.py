"""New weights for sampling, through the real SDK: fixed weights, and weights that follow the model."""

from __future__ import annotations

import tinker
from tinker import types

from tests.contract.data import sentences, train

PROMPT = types.ModelInput.from_ints(sentences(1)[0])


def scores(client: tinker.SamplingClient) -> list[float]:
    """Logprobs of a fixed prompt: they tell one version of the weights from another."""
    return [value for value in client.compute_logprobs(PROMPT).result() if value is not None]


def test_in_flight_clients_follow_the_newest_save_and_a_snapshot_stays(training: tinker.TrainingClient):
    train(training, 2)
    first = training.save_weights_and_get_sampling_client(kind="inflight").result()
    fixed = training.save_weights_and_get_sampling_client().result()
    before = scores(first)
    assert scores(fixed) == before
    train(training, 3)
    second = training.save_weights_and_get_sampling_client(kind="inflight").result()
    after = scores(second)
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-3
    assert scores(first) == after
    assert scores(fixed) == before
