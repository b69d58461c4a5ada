"""Calls of one SDK client and all their results: the same every time for the same seed, through every kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from safetensors.numpy import load_file
from tinker import types

from app.domain.checkpoints import MANIFEST
from app.domain.records import Checkpoint
from app.stores.redis.records import RedisRecords, load
from tests.chaos.patience import patiently
from tests.contract.data import ADAM, datum, logprobs, sentences
from tests.contract.stack import BASE, Stack

# Long enough to be hit in the middle, short enough that hundreds of plays fit into a run.
_ROWS, _LENGTH = 64, 64
# A future that takes this long is lost: the longest outage here takes seconds.
_PATIENCE_S = 600.0
ROUNDS = 8

Transcript = dict[str, Any]


def play(stack: Stack, seed: int, rounds: int = ROUNDS, keep_s: int | None = None) -> Transcript:
    """Trains, saves, loads and samples on a separate model; returns the results by name. The checkpoints expire after
    `keep_s`."""
    with stack.client() as service:
        client = service.create_lora_training_client(base_model=BASE, rank=4, seed=seed).result(_PATIENCE_S)
        found: Transcript = {}
        for number in range(rounds):
            found.update(_train(client, seed, number))
            found.update(_further(stack, client, seed, number, keep_s))
        found["forward"] = _output(client.forward(_batch(seed), "cross_entropy").result(_PATIENCE_S))
        found.update(_files(stack, client.save_state("end", keep_s).result(_PATIENCE_S).path, "end"))
        return found


def _train(client: tinker.TrainingClient, seed: int, number: int) -> Iterator[tuple[str, Any]]:
    """A step of two batches. Its calls are sent before any is answered, as in the cookbook."""
    parts = [
        client.forward_backward(_batch(seed, 2 * number), "cross_entropy"),
        client.forward_backward(_policy(seed, 2 * number + 1), "importance_sampling"),
    ]
    step = client.optim_step(ADAM)
    for index, part in enumerate(parts):
        yield f"{number}.part{index}", _output(part.result(_PATIENCE_S))
    yield f"{number}.step", step.result(_PATIENCE_S).metrics


def _further(
    stack: Stack, client: tinker.TrainingClient, seed: int, number: int, keep_s: int | None
) -> Iterator[tuple[str, Any]]:
    """Further calls of a run, each in a separate round."""
    match number % 4:
        case 0:
            yield from _custom(client, seed, number)
        case 1:
            saving = client.save_state(f"at-{number}", keep_s)
            yield from _train(client, seed, 100 + number)  # beside it
            yield from _files(stack, saving.result(_PATIENCE_S).path, f"at-{number}")
        case 2:
            yield f"{number}.samples", _samples(client, seed)
        case 3:
            path = f"tinker://{client.model_id}/weights/at-{number - 2}"
            client.load_state_with_optimizer(path).result(_PATIENCE_S)
            yield f"{number}.loaded", _output(client.forward(_batch(seed), "cross_entropy").result(_PATIENCE_S))


def _custom(client: tinker.TrainingClient, seed: int, number: int) -> Iterator[tuple[str, Any]]:
    """A custom loss on the client takes two passes: its gradient is computed from the first pass' logprobs."""

    def squared(data: list[types.Datum], scores: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        loss = torch.stack([row.square().mean() for row in scores]).sum()
        return loss, {"squared:sum": float(loss.detach())}

    output = client.forward_backward_custom(_batch(seed, 1000 + number), squared).result(_PATIENCE_S)
    yield f"{number}.custom", _output(output)
    yield f"{number}.custom_step", client.optim_step(ADAM).result(_PATIENCE_S).metrics


def _samples(client: tinker.TrainingClient, seed: int) -> list[tuple[Any, ...]]:
    sampler = client.save_weights_and_get_sampling_client().result(_PATIENCE_S)
    params = types.SamplingParams(max_tokens=12, temperature=1.0, seed=seed)
    prompt = types.ModelInput.from_ints(sentences(1, seed=seed)[0])
    pending = [sampler.sample(prompt, 2, params) for _ in range(2)]
    answers = [future.result(_PATIENCE_S) for future in pending]
    return [(s.tokens, s.logprobs, s.stop_reason) for answer in answers for s in answer.sequences]


def _files(stack: Stack, path: str, name: str) -> Iterator[tuple[str, Any]]:
    """Weights and optimizer state, as the bytes of their files."""
    with stack.redis() as redis:
        stored = patiently(lambda: RedisRecords(redis).get(Checkpoint.namespace, path))
    assert stored is not None, f"{path} was saved and is not recorded"
    yield f"{name}.files", _contents(stack.data_dir / "objects" / load(Checkpoint, stored).prefix)


def _contents(folder: Path) -> dict[str, Any]:
    """Contents by file, without the manifest's time and author, which may differ."""
    files = sorted(path for path in folder.iterdir() if path.name != MANIFEST)
    assert files, f"{folder} is empty"
    return {path.name: load_file(path) if path.suffix == ".safetensors" else path.read_bytes() for path in files}


def _output(output: types.ForwardBackwardOutput) -> tuple[np.ndarray, dict[str, float]]:
    return logprobs(output), dict(output.metrics)


def _batch(seed: int, number: int = 0) -> list[types.Datum]:
    return [datum(tokens) for tokens in sentences(_ROWS, _LENGTH, seed=10_000 * seed + number)]


def _policy(seed: int, number: int) -> list[types.Datum]:
    """A batch for policy losses with made-up behaviour logprobs; they need not come from the model."""
    rows = sentences(_ROWS, _LENGTH, seed=10_000 * seed + number)
    return [datum(row, logprobs=[-5.5] * len(row), advantages=[(-1.0) ** at for at in range(len(row))]) for row in rows]
