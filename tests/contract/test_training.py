"""The SDK's training calls against a running stack."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.contract.data import ADAM, datum, logprobs, policy, sentences, supervised, train
from tests.contract.stack import BASE, Stack


def test_pipelined_steps_lower_the_loss(training: tinker.TrainingClient):
    losses = train(training, 8)
    assert losses[-1] < 0.7 * losses[0]


def test_what_runs_is_a_deepspeed_engine_at_the_stage_and_ranks_of_the_settings(stack: Stack):
    wanted = stack.settings().base_models[0].trainer
    (trainer,) = [worker.describe for worker in stack.workers() if worker.role == "trainer"]
    assert trainer["trainer"] == "DeepSpeedEngine"
    assert (trainer["zero_stage"], trainer["ranks"]) == (wanted.zero_stage, wanted.ranks)


def test_a_forward_changes_nothing(training: tinker.TrainingClient):
    first = logprobs(training.forward(supervised(), "cross_entropy").result())
    training.optim_step(ADAM).result()  # nothing pending: an AdamW step on zero gradients moves nothing yet
    again = logprobs(training.forward(supervised(), "cross_entropy").result())
    assert np.array_equal(first, again)


@pytest.mark.parametrize(
    ("loss", "config"),
    [("importance_sampling", None), ("ppo", {"clip_low_threshold": 0.9}), ("cispo", None), ("dro", {"beta": 0.1})],
)
def test_every_policy_loss_trains_and_its_config_matters(training: tinker.TrainingClient, loss, config):
    output = training.forward_backward(policy(), loss, loss_fn_config=config).result()
    assert np.isfinite(output.metrics["loss:sum"])
    assert logprobs(output).shape == (12 + 13 + 14,)
    step = training.optim_step(ADAM).result()
    assert step.metrics is not None and any("grad_norm" in key and value > 0 for key, value in step.metrics.items())


def test_wide_targets_score_every_candidate(training: tinker.TrainingClient):
    tokens = sentences(1)[0]
    targets = np.stack([np.roll(tokens, -1), np.roll(tokens, -2)], axis=1)
    wide = datum(tokens, weights=np.full(targets.shape, 0.5, dtype=np.float32))
    wide = types.Datum(
        model_input=wide.model_input,
        loss_fn_inputs={**wide.loss_fn_inputs, "target_tokens": torch.from_numpy(targets)},
    )
    both = training.forward([wide], "cross_entropy").result()
    single = training.forward([datum(tokens)], "cross_entropy").result()
    scores = both.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert scores.shape == targets.shape
    np.testing.assert_allclose(scores[:-1, 0], logprobs(single)[:-1], atol=1e-5)
    assert both.metrics["loss:sum"] == pytest.approx(-0.5 * scores.sum(), rel=1e-5)
    np.testing.assert_array_equal(both.loss_fn_outputs[0]["elementwise_loss"].to_numpy(), -0.5 * scores)


def test_a_batch_of_several_chunks_equals_the_whole(training: tinker.TrainingClient, service: tinker.ServiceClient):
    """1,030 datums make two requests, and the SDK sends the first of them last."""
    data = [datum(tokens) for tokens in sentences(1030, length=3, seed=5)]
    data = [datum(row.model_input.to_ints()[:4]) for row in data]
    output = training.forward_backward(data, "cross_entropy").result()
    scores = logprobs(output)
    assert output.metrics["loss:sum"] == pytest.approx(-scores.sum(), rel=1e-5)
    parts = [training.forward(data[i : i + 515], "cross_entropy").result() for i in (0, 515)]
    np.testing.assert_allclose(scores, np.concatenate([logprobs(part) for part in parts]), atol=1e-5)
    assert training.optim_step(ADAM).result() is not None


def test_a_custom_loss_runs_client_side_in_two_passes(training: tinker.TrainingClient, stack: Stack):
    def loss(data: list[types.Datum], scores: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        total = -sum((row * row).sum() for row in scores)
        return total, {"custom:sum": float(total)}

    before = stack.applied(training.model_id)
    output = training.forward_backward_custom(supervised(), loss).result()
    assert stack.applied(training.model_id) - before == 2
    assert output.metrics["custom:sum"] == pytest.approx(output.metrics["loss:sum"], rel=1e-5)
    assert training.optim_step(ADAM).result() is not None


def test_saved_state_resumes_bit_for_bit_with_its_optimizer(
    training: tinker.TrainingClient, service: tinker.ServiceClient
):
    train(training, 3)
    path = training.save_state("resume").result().path
    assert path.startswith("tinker://") and path.endswith("/weights/resume")
    other = service.create_training_client_from_state_with_optimizer(path).result()
    for client in (training, other):
        train(client, 2)
    expected, found = (logprobs(c.forward(supervised(seed=9), "cross_entropy").result()) for c in (training, other))
    assert np.array_equal(expected, found)


def test_loading_without_the_optimizer_resets_it(training: tinker.TrainingClient):
    train(training, 3)
    path = training.save_state("weights-only").result().path
    before = logprobs(training.forward(supervised(), "cross_entropy").result())
    train(training, 1)
    training.load_state(path).result()
    after = logprobs(training.forward(supervised(), "cross_entropy").result())
    assert np.array_equal(before, after)
    training.optim_step(ADAM).result()  # zero gradient, and no momentum left to move by
    assert np.array_equal(after, logprobs(training.forward(supervised(), "cross_entropy").result()))


def test_two_models_of_different_ranks_do_not_touch_each_other(service: tinker.ServiceClient):
    alone = service.create_lora_training_client(base_model=BASE, rank=4, seed=11).result()
    expected = train(alone, 4)
    one = service.create_lora_training_client(base_model=BASE, rank=4, seed=11).result()
    two = service.create_lora_training_client(base_model=BASE, rank=16, seed=12, train_unembed=False).result()
    found = []
    for _ in range(4):
        found += train(one, 1)
        train(two, 1, policy_free())
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def policy_free() -> list[types.Datum]:
    return supervised(2, seed=21)


def test_a_model_says_what_it_is(training: tinker.TrainingClient):
    info = training.get_info()
    assert info.model_data.model_name == BASE
    assert (info.is_lora, info.lora_rank) == (True, 8)
    assert training.get_tokenizer().decode(training.get_tokenizer().encode("tin")) == "tin"
