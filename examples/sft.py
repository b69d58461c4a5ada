"""Supervised fine-tuning on your conversations: `python sft.py pirates.jsonl`.

Each line of the file is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}.
The model learns the last message of each line. The program prints the loss and downloads the adapter.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import urllib.request
from pathlib import Path
from typing import Any

import tinker
from tinker import types

URL = os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("TINKER_API_KEY") or Path("tinsmith-data/api-key").read_text().strip()


def datum(tokenizer: Any, messages: list[dict[str, str]]) -> types.Datum:
    """Predicts each next token; only the tokens of the last message have a weight."""
    question = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(question, add_special_tokens=False)
    answer = tokenizer.encode(messages[-1]["content"] + tokenizer.eos_token, add_special_tokens=False)
    tokens, weights = prompt + answer, [0.0] * len(prompt) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )


def download(rest: tinker.RestClient, path: str, folder: Path) -> None:
    """Downloads the files of an export."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, url in rest.get_external_weights_urls(path).result().urls.items():
        urllib.request.urlretrieve(url, folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tunes an adapter on conversations.")
    parser.add_argument("data", type=Path, help="a .jsonl file of conversations")
    parser.add_argument("--model", help="name of a base model of the server; default: its first")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8, help="conversations a step")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapter")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0, help="of the adapter")
    parser.add_argument("--merged", action="store_true", help="download the whole model instead of the adapter")
    parser.add_argument("--out", type=Path, default=Path("adapter"), help="folder for the download")
    args = parser.parse_args()

    service, rest = tinker.ServiceClient(base_url=URL, api_key=KEY), tinker.RestClient(base_url=URL, api_key=KEY)
    base = args.model or rest.get_server_capabilities().result().supported_models[0].model_name
    form = {"export_format": "huggingface" if args.merged else "peft"}
    trainer = service.create_lora_training_client(base, rank=args.rank, seed=args.seed, user_metadata=form).result()
    tokenizer = trainer.get_tokenizer()
    data = [datum(tokenizer, json.loads(line)["messages"]) for line in args.data.open(encoding="utf-8") if line.strip()]
    print(f"{len(data)} conversations, {base}")
    for step in range(args.steps):
        batch = random.Random(step).sample(data, min(args.batch, len(data)))
        tokens = sum(sum(one.loss_fn_inputs["weights"].data) for one in batch)
        passed = trainer.forward_backward(batch, "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=args.learning_rate)).result()
        print(f"step {step + 1} of {args.steps}   loss {passed.result().metrics['loss:sum'] / tokens:.3f}")
    print("sample it as:", trainer.save_weights_for_sampler("sft").result().path)
    download(rest, trainer.save_weights_external("sft").result().path, args.out)
    print("downloaded to:", args.out)


if __name__ == "__main__":
    main()
