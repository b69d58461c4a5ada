"""On-policy distillation: `python distill.py TEACHER pirates.jsonl`.

The student answers, the teacher scores each token of the answer, and the student learns to answer as the teacher
would. TEACHER is a base model of the server, or a path `tinker://...` that another example printed. Only the messages
before the last one of each line of the file are used.
"""

from __future__ import annotations

import argparse
import json
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


def prompt_of(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def rollout(prompt: list[int], sequence: types.SampledSequence, teacher: list[float]) -> types.Datum:
    """An answer. A token's advantage is the teacher's logprob of it less the student's: the reverse KL, negated."""
    tokens, before = prompt + sequence.tokens, len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * before + sequence.logprobs,
            "advantages": [0.0] * before + [t - s for t, s in zip(teacher, sequence.logprobs, strict=True)],
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains an adapter to answer as a teacher.")
    parser.add_argument("teacher", help="name of a base model, or a path tinker://...")
    parser.add_argument("data", type=Path, help="a .jsonl file of conversations")
    parser.add_argument("--model", help="name of the student's base model; default: the server's first")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="prompts a step")
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of an answer")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0, help="of the adapter and of the answers")
    args = parser.parse_args()

    service, rest = tinker.ServiceClient(base_url=URL, api_key=KEY), tinker.RestClient(base_url=URL, api_key=KEY)
    base = args.model or rest.get_server_capabilities().result().supported_models[0].model_name
    kind = "model_path" if args.teacher.startswith("tinker://") else "base_model"
    teacher = service.create_sampling_client(**{kind: args.teacher}).result()
    trainer = service.create_lora_training_client(base, rank=16, seed=args.seed).result()
    tokenizer = trainer.get_tokenizer()
    params = partial(types.SamplingParams, max_tokens=args.tokens, temperature=1.0, stop=[tokenizer.eos_token_id])
    seeds = count(args.seed)
    lines = [json.loads(line)["messages"][:-1] for line in args.data.open(encoding="utf-8") if line.strip()]
    for step in range(args.steps):
        student = trainer.save_weights_and_get_sampling_client().result()
        chosen = random.Random(step).sample(lines, min(args.batch, len(lines)))
        prompts = [prompt_of(tokenizer, messages) for messages in chosen]
        asked = [student.sample(types.ModelInput.from_ints(p), 1, params(seed=next(seeds))) for p in prompts]
        answers = [answer.result().sequences[0] for answer in asked]
        wholes = [types.ModelInput.from_ints(p + a.tokens) for p, a in zip(prompts, answers, strict=True)]
        scored = [score.result() for score in [teacher.compute_logprobs(whole) for whole in wholes]]
        scores = [score[len(prompt) :] for prompt, score in zip(prompts, scored, strict=True)]
        data = [rollout(*one) for one in zip(prompts, answers, scores, strict=True)]
        trainer.forward_backward(data, "importance_sampling").result()
        trainer.optim_step(types.AdamParams(learning_rate=args.learning_rate)).result()
        gap = sum(sum(a.logprobs) - sum(s) for a, s in zip(answers, scores, strict=True))
        print(f"step {step + 1} of {args.steps}   KL {gap / sum(len(a.tokens) for a in answers):.4f} nats a token")
    print("sample it as:", trainer.save_weights_for_sampler("distilled").result().path)


if __name__ == "__main__":
    main()
