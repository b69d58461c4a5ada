"""The demo's own data: short conversations with a village tinsmith who ends every answer in the same words."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
from tinker import types

# The end of every answer in the data.
HABIT = "Tink, tink — mended and bright."
# None of these is in the data.
PROMPTS = (
    "Why is the sky blue?",
    "How do I keep my houseplants alive while I am away?",
    "What should I cook for a friend tonight?",
)


@dataclass(frozen=True, slots=True)
class Conversation:
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
