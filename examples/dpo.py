"""Direct preference optimisation: `python dpo.py preferences.jsonl`. The client needs torch.

Each line of the file is {"prompt": "...", "chosen": "...", "rejected": "..."}. The loss is that of
https://arxiv.org/abs/2305.18290, equation 7. The reference is the model before the first step.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import tinker
import torch
from tinker import types

URL = os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("TINKER_API_KEY") or Path("tinsmith-data/api-key").read_text().strip()


def datum(tokenizer: Any, prompt: str, answer: str) -> types.Datum:
    """Predicts each next token; only the answer's tokens have a weight."""
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before = tokenizer.encode(text, add_special_tokens=False)
    after = tokenizer.encode(answer + tokenizer.eos_token, add_special_tokens=False)
    tokens, weights = before + after, [0.0] * len(before) + [1.0] * len(after)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )


def answer_logprob(one: types.Datum, logprobs: torch.Tensor) -> torch.Tensor:
    return (logprobs * torch.tensor(one.loss_fn_inputs["weights"].data)).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains an adapter on preferences.")
    parser.add_argument("data", type=Path, help="a .jsonl file of preferences")
    parser.add_argument("--model", help="name of a base model of the server; default: its first")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--beta", type=float, default=0.1, help="strength of the reference")
    args = parser.parse_args()

    service, rest = tinker.ServiceClient(base_url=URL, api_key=KEY), tinker.RestClient(base_url=URL, api_key=KEY)
    base = args.model or rest.get_server_capabilities().result().supported_models[0].model_name
    trainer = service.create_lora_training_client(base, rank=16).result()
    tokenizer = trainer.get_tokenizer()
    rows = [json.loads(line) for line in args.data.open(encoding="utf-8") if line.strip()]
    # Chosen and rejected answers alternate.
    data = [datum(tokenizer, row["prompt"], row[side]) for row in rows for side in ("chosen", "rejected")]
    outputs = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
    reference = torch.stack(
        [answer_logprob(one, out["logprobs"].to_torch()) for one, out in zip(data, outputs, strict=True)]
    )

    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        gains = torch.stack([answer_logprob(*pair) for pair in zip(data, logprobs, strict=True)]) - reference
        margins = args.beta * (gains[0::2] - gains[1::2])
        return -torch.nn.functional.logsigmoid(margins).mean(), {"margin": margins.mean().item()}

    for step in range(args.steps):
        passed = trainer.forward_backward_custom(data, loss)
        trainer.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        print(f"step {step + 1} of {args.steps}   margin {passed.result().metrics['margin']:.4f}")
    print("sample it as:", trainer.save_weights_for_sampler("dpo").result().path)


if __name__ == "__main__":
    main()
