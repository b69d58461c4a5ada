"""The demo's client side: nothing here knows more than the public tinker SDK."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import tinker
from tinker import types
from tqdm import tqdm

from app.demo.data import PROMPTS, answer_tokens, conversations, datum, prompt_tokens

RANK = 16
EPOCHS = 8
BATCH = 12
_LEARNING_RATE = 2e-3
_ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
_MAX_TOKENS = 80


def answers(sampler: tinker.SamplingClient, tokenizer: Any) -> list[str]:
    """What the model says to each of PROMPTS, greedily."""
    params = types.SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0, seed=0, stop=[tokenizer.eos_token])
    futures = [
        sampler.sample(
            prompt=types.ModelInput.from_ints(prompt_tokens(tokenizer, question)),
            num_samples=1,
            sampling_params=params,
        )
        for question in PROMPTS
    ]
    return [
        tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True).strip() for future in futures
    ]


def fine_tune(client: tinker.TrainingClient, tokenizer: Any) -> list[float]:
    """Train on all conversations; returns the mean loss of an answer's token (nats) at every step."""
    data = [datum(tokenizer, conversation) for conversation in conversations()]
    batches = list(_batches(data))
    losses: list[float] = []
    with tqdm(batches, desc="fine-tuning", unit="step") as bar:
        for step, batch in enumerate(bar):
            loss = _step(client, batch, _LEARNING_RATE * (1 - step / len(batches)))
            losses.append(loss)
            bar.set_postfix_str(f"loss {loss:.3f}")
    return losses


def _step(client: tinker.TrainingClient, batch: list[types.Datum], learning_rate: float) -> float:
    backward = client.forward_backward(batch, "cross_entropy")
    update = client.optim_step(types.AdamParams(learning_rate=learning_rate, **_ADAM))
    loss = float(backward.result().metrics["loss:sum"])
    update.result()
    return loss / sum(answer_tokens(datum) for datum in batch)


def _batches(data: list[types.Datum]) -> Iterator[list[types.Datum]]:
    order = random.Random(0)
    for _ in range(EPOCHS):
        shuffled = order.sample(data, len(data))
        yield from (shuffled[start : start + BATCH] for start in range(0, len(shuffled), BATCH))
