"""The demo's client side, which uses only the public tinker SDK, and its data: short conversations with a village
tinsmith who ends every answer in the same words.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import mean
from typing import Any

import numpy as np
import tinker
from tinker import types

# The end of every answer in the data.
HABIT = "Tink, tink — mended and bright."
# None of these is in the data.
PROMPTS = (
    "Why is the sky blue?",
    "How do I keep my houseplants alive while I am away?",
    "What should I cook for a friend tonight?",
)

RANK = 16
BATCH = 6
# With fewer steps the habit does not show; with more it shows no better.
FEWEST_STEPS = 12
MOST_STEPS = 24
_WARM_UP = 1
_LEARNING_RATE = 3e-3
_ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
_MAX_TOKENS = 80


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation of the demo's data: a question, and the tinsmith's answer."""

    question: str
    answer: str


def conversations() -> list[Conversation]:
    lines = files("app.demo").joinpath("conversations.jsonl").read_text(encoding="utf-8").splitlines()
    return [Conversation(**json.loads(line)) for line in lines]


def prompt_tokens(tokenizer: Any, question: str) -> list[int]:
    """The question in the model's chat template, up to where the assistant begins."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def datum(tokenizer: Any, conversation: Conversation) -> types.Datum:
    """A datum that predicts every next token, with weight 1 on the answer and its end mark and 0 on the prompt."""
    prompt = prompt_tokens(tokenizer, conversation.question)
    answer = tokenizer.encode(conversation.answer + tokenizer.eos_token, add_special_tokens=False)
    tokens = [*prompt, *answer]
    weights = np.concatenate([np.zeros(len(prompt) - 1), np.ones(len(answer))]).astype(np.float32)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:], dtype=np.int64)),
            "weights": types.TensorData.from_numpy(weights),
        },
    )


def answer_tokens(datum: types.Datum) -> float:
    """The number of tokens that the loss counts."""
    return float(datum.loss_fn_inputs["weights"].to_numpy().sum())


def answers(sampler: tinker.SamplingClient, tokenizer: Any) -> list[str]:
    """The model's greedy answers to PROMPTS."""
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


def fine_tune(client: tinker.TrainingClient, tokenizer: Any, deadline: float) -> list[float]:
    """Trains on the conversations until about `deadline` (of time.monotonic, in seconds), and prints each step.

    Returns the mean loss of an answer's token (nats) at every step.
    """
    data = [datum(tokenizer, conversation) for conversation in conversations()]
    losses: list[float] = []
    seconds: list[float] = []
    steps = MOST_STEPS
    for batch in _batches(data):
        started = time.monotonic()
        losses.append(_step(client, batch, learning_rate(len(losses), steps)))
        seconds.append(time.monotonic() - started)
        steps = steps_in_all(seconds, deadline - time.monotonic())
        if len(losses) == _WARM_UP + 1:
            print(f"  A step takes {seconds[-1]:.1f} s here: {steps} steps, {_about(steps * seconds[-1])}")
        print(f"  step {len(losses):2} of {steps}   loss {losses[-1]:.2f}", flush=True)
        if len(losses) == steps:
            break
    return losses


def steps_in_all(seconds: Sequence[float], seconds_left: float) -> int:
    """The number of steps to train for, when the steps so far took `seconds` each and `seconds_left` remain.

    The first step warms the server up, so it counts only while it is the only one.
    """
    step_s = mean(seconds[_WARM_UP:] or seconds)
    done = len(seconds)
    return min(MOST_STEPS, max(FEWEST_STEPS, done, done + int(seconds_left / step_s)))


def learning_rate(done: int, steps: int) -> float:
    """The learning rate of the step after `done` of `steps`. It falls linearly, to zero after the last step."""
    return _LEARNING_RATE * (1 - done / steps)


def _about(seconds: float) -> str:
    return f"about {round(seconds / 60)} minutes" if seconds >= 90 else f"about {seconds:.0f} s"


def _step(client: tinker.TrainingClient, batch: list[types.Datum], learning_rate: float) -> float:
    backward = client.forward_backward(batch, "cross_entropy")
    update = client.optim_step(types.AdamParams(learning_rate=learning_rate, **_ADAM))
    loss = float(backward.result().metrics["loss:sum"])
    update.result()
    return loss / sum(answer_tokens(datum) for datum in batch)


def _batches(data: list[types.Datum]) -> Iterator[list[types.Datum]]:
    """Yields batches without end: all of the data in one order after another."""
    order = random.Random(0)
    while True:
        shuffled = order.sample(data, len(data))
        yield from (shuffled[start : start + BATCH] for start in range(0, len(shuffled), BATCH))
