"""A reinforcement learning loop through the SDK: the share of its time that is not the model's own.

SmolLM2-135M-Instruct in bfloat16 with an adapter of rank 32. A step transfers new weights to the sampler, samples
groups, scores them by a sum over their tokens, and trains on them. Sampling and training wait for each other, as in the
cookbook's rl_loop.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

from ops.bench import batches, client_batches, metrics, models, servers, side
from ops.bench.report import Goal, Outcome

_RANK = 32
_GROUPS, _GROUP, _PROMPT_TOKENS, _TOKENS = 8, 8, 32, 64
_STEPS = 3
_GOAL = 0.05
_TRAINING = ("forward_backward", "optim_step")
Readings = Mapping[str, metrics.Reading]


def run(folder: Path) -> Outcome:
    base = models.bundled()
    vocab_size = json.loads((Path(base.path) / "config.json").read_text())["vocab_size"]
    prompts = batches.random_tokens(_GROUPS, _PROMPT_TOKENS, vocab_size)
    with (
        side.threads(side.CORES),
        servers.running_stack(folder, base) as stack,
        tinker.ServiceClient(base_url=stack.url, api_key=servers.API_KEY) as service,
    ):
        client = service.create_lora_training_client(base_model=base.name, rank=_RANK).result()
        _step(client, prompts)
        before, started = _readings(stack), time.perf_counter()
        for _ in range(_STEPS):
            _step(client, prompts)
        wall_ms = 1000 * (time.perf_counter() - started) / _STEPS
        return _outcome(wall_ms, before, _readings(stack))


def _step(client: tinker.TrainingClient, prompts: np.ndarray) -> None:
    sampler = client.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=_TOKENS, stop=[])
    pending = [sampler.sample(types.ModelInput.from_ints(row.tolist()), _GROUP, params) for row in prompts]
    data = [
        datum
        for row, future in zip(prompts, pending, strict=True)
        for datum in _datums(row.tolist(), future.result().sequences)
    ]
    backward = client.forward_backward(data, "importance_sampling")
    step = client.optim_step(client_batches.adam())
    backward.result()
    step.result()


def _datums(prompt: list[int], sequences: list[types.SampledSequence]) -> list[types.Datum]:
    """Datums of a group: each sequence's reward minus the group's mean."""
    rewards = np.array([np.mean(np.array(sequence.tokens) % 7) for sequence in sequences])
    return [
        _datum(prompt, sequence, float(advantage))
        for sequence, advantage in zip(sequences, rewards - rewards.mean(), strict=True)
    ]


def _datum(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    tokens, before = [*prompt, *sequence.tokens], len(prompt) - 1

    def padded(values: list[float]) -> tinker.TensorData:
        return tinker.TensorData.from_numpy(np.array([0.0] * before + values, np.float32))

    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.array(tokens[1:], np.int64)),
            "logprobs": padded(list(sequence.logprobs or [])),
            "advantages": padded([advantage] * len(sequence.tokens)),
        },
    )


def _readings(stack: servers.Stack) -> Readings:
    return {role: metrics.read(stack.metrics_url(role)) for role in ("trainer", "sampler")}


def _outcome(wall_ms: float, before: Readings, after: Readings) -> Outcome:
    """A step's requests are sampled together, so the mean of their times is at most the time of all of them."""

    def run_ms(role: str, kind: str) -> float:
        return metrics.stages_ms(before[role], after[role], kind)["run"]

    inside = {kind: run_ms("trainer", kind) for kind in _TRAINING} | {"sample": run_ms("sampler", "sample")}
    outside = 1 - sum(inside.values()) / wall_ms
    figures: dict[str, Any] = {
        "steps": _STEPS,
        "threads": side.CORES,
        "samples_a_step": _GROUPS * _GROUP,
        "tokens_a_step": _GROUPS * _GROUP * (_PROMPT_TOKENS + _TOKENS),
        "step_ms": wall_ms,
        "model_ms": inside,
        "outside_share": outside,
    }
    return Outcome(figures, (Goal("RL loop: share outside the model", outside, "at_most", _GOAL, ""),))
