"""Reinforcement learning with a reward function: `python rl.py`.

Each step samples answers to each question and trains towards those above their mean reward. The task is addition.
"""

from __future__ import annotations

import argparse
import os
import random
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import tinker
from tinker import types

URL = os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("TINKER_API_KEY") or Path("tinsmith-data/api-key").read_text().strip()
QUESTIONS, GROUP = 8, 8  # questions a step, answers to each


def questions(step: int) -> list[tuple[str, str]]:
    """Questions of a step, each with its answer."""
    pairs = zip(*(random.Random(f"{step} {term}").choices(range(1, 10), k=QUESTIONS) for term in "ab"), strict=True)
    return [(f"What is {a} + {b}? Answer with the number alone.", str(a + b)) for a, b in pairs]


def reward(text: str, answer: str) -> float:
    """1 for the right number alone, else at most a half: the share of digits in the text."""
    return 1.0 if text.strip() == answer else 0.5 * sum(letter.isdigit() for letter in text) / max(len(text), 1)


def rollout(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """An answer with the logprobs of its sampling. The prompt's tokens have no advantage."""
    tokens, before = prompt + sequence.tokens, len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * before + sequence.logprobs,
            "advantages": [0.0] * before + [advantage] * len(sequence.tokens),
        },
    )


def prompt_of(tokenizer: Any, text: str) -> list[int]:
    message = {"role": "user", "content": text}
    chat = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(chat, add_special_tokens=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains an adapter on a reward.")
    parser.add_argument("--model", help="name of a base model of the server; default: its first")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0, help="of the adapter and of the answers")
    args = parser.parse_args()
    service, rest = tinker.ServiceClient(base_url=URL, api_key=KEY), tinker.RestClient(base_url=URL, api_key=KEY)
    base = args.model or rest.get_server_capabilities().result().supported_models[0].model_name
    trainer = service.create_lora_training_client(base, rank=16, seed=args.seed).result()
    tokenizer = trainer.get_tokenizer()
    params = partial(types.SamplingParams, max_tokens=16, temperature=1.0, stop=[tokenizer.eos_token_id])
    seeds = count(args.seed)
    for step in range(args.steps):
        sampler, data, rewards = trainer.save_weights_and_get_sampling_client().result(), [], []
        asked = [(prompt_of(tokenizer, text), answer) for text, answer in questions(step)]
        groups = [sampler.sample(types.ModelInput.from_ints(p), GROUP, params(seed=next(seeds))) for p, _ in asked]
        for (prompt, answer), group in zip(asked, groups, strict=True):
            sequences = group.result().sequences
            scores = [reward(tokenizer.decode(one.tokens, skip_special_tokens=True), answer) for one in sequences]
            mean = sum(scores) / len(scores)
            data += [rollout(prompt, one, score - mean) for one, score in zip(sequences, scores, strict=True)]
            rewards += scores
        trainer.forward_backward(data, "importance_sampling").result()
        trainer.optim_step(types.AdamParams(learning_rate=args.learning_rate)).result()
        print(f"step {step + 1} of {args.steps}   reward {sum(rewards) / len(rewards):.3f}")
    print("sample it as:", trainer.save_weights_for_sampler("rl").result().path)


if __name__ == "__main__":
    main()
