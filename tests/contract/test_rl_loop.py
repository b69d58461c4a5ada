"""A loop as the cookbook's rl_loop: transfer new weights, sample groups, train on their rewards."""

from __future__ import annotations

import numpy as np
import tinker
from tinker import types

from tests.contract.data import logprobs, sentences

STEPS, GROUPS, GROUP, TOKENS = 12, 4, 16, 8
PARAMS = types.SamplingParams(max_tokens=TOKENS, temperature=1.0, stop=[])
ADAM = types.AdamParams(learning_rate=2e-2, beta1=0.9, beta2=0.95, eps=1e-8)


def reward(tokens: list[int]) -> float:
    """Share of tokens divisible by three; a third at the start."""
    return float(np.mean(np.array(tokens) % 3 == 0))


def rollout(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    tokens, before = [*prompt, *sequence.tokens], len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * before + sequence.logprobs,
            "advantages": [0.0] * before + [advantage] * TOKENS,
        },
    )


def step(training: tinker.TrainingClient, prompts: list[list[int]]) -> tuple[float, float]:
    """Returns the mean reward, and the mean difference between the sampler's and the trainer's logprobs."""
    sampling = training.save_weights_and_get_sampling_client().result()
    asked = [sampling.sample(types.ModelInput.from_ints(prompt), GROUP, PARAMS) for prompt in prompts]
    groups = [found.result().sequences for found in asked]
    rewards = np.array([[reward(sequence.tokens) for sequence in group] for group in groups])
    advantages = rewards - rewards.mean(1, keepdims=True)
    data = [
        rollout(prompt, sequence, float(advantage))
        for prompt, group, row in zip(prompts, groups, advantages, strict=True)
        for sequence, advantage in zip(group, row, strict=True)
    ]
    backward, stepped = training.forward_backward(data, "importance_sampling"), training.optim_step(ADAM)
    trained = logprobs(backward.result())
    stepped.result()
    sampled = np.concatenate([datum.loss_fn_inputs["logprobs"].to_numpy() for datum in data])
    drawn = sampled != 0
    return float(rewards.mean()), float(np.abs(sampled - trained)[drawn].mean())


def test_rewards_rise_and_the_sampler_stays_on_the_policy_that_is_trained(training: tinker.TrainingClient):
    prompts = sentences(GROUPS)
    rewards, divergences = zip(*(step(training, prompts) for _ in range(STEPS)), strict=True)
    assert np.abs(divergences).max() < 1e-3
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2
