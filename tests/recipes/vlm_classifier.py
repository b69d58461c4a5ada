"""The cookbook's VLM classifier with its default options, on pictures of one colour each.

    python -m tests.recipes.vlm_classifier URL

The address of the server and the place of the log are given, and options that make the run shorter. The data set is a
folder in the working directory with the name of the default one, and a tiny model is served under the default's name.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from tests.confined import confine
from tests.contract.stack import Stack
from tests.models import EOS_TOKEN, byte_tokenizer
from tests.pictures import tiny_reader
from tests.servers import free_port

BASE, PICTURES = "Qwen/Qwen3.5-397B-A17B", "dpdl-benchmark/caltech101"
STEPS = 6
_SHORTER = {"max_steps": STEPS, "batch_size": 8, "n_eval": 4, "max_tokens": 8}
_COLOURS = {"red_metal": (200, 40, 30), "blue-steel": (30, 60, 190)}
_TOKENS = ("<think>", "</think>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endfor %}"
)


def serving(folder: Path) -> Stack:
    """A stack, not started, that serves a tiny model of the default's family."""
    tokenizer = byte_tokenizer(*_TOKENS)
    tokenizer.chat_template = _TEMPLATE
    end, placeholder = tokenizer.convert_tokens_to_ids([EOS_TOKEN, "<|image_pad|>"])
    base = tiny_reader("qwen3.5-moe", folder / "base", placeholder, eos_token_id=end)
    tokenizer.save_pretrained(base)
    trainer, sampler, program = 'backend = "torch"', 'backend = "transformers"', "tests.warm_workers"
    return Stack(folder / "data", base, free_port(), trainer, sampler, program=program, threads=1, name=BASE)


def lay_out(folder: Path) -> Path:
    """Writes 48 pictures for training and 8 others for tests, in a folder for each class."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 24), ("test", 4)):
        for name, colour in _COLOURS.items():
            place = folder / PICTURES / split / name
            place.mkdir(parents=True)
            for i, picture in enumerate(_pictures(rng, colour, count)):
                picture.save(place / f"{i}.png")
    return folder


def _pictures(rng: np.random.Generator, colour: tuple[int, int, int], count: int) -> Iterator[Image.Image]:
    for _ in range(count):
        noise = rng.integers(-25, 26, (int(rng.integers(16, 33)), int(rng.integers(16, 33)), 3))
        yield Image.fromarray((np.array(colour) + noise).astype(np.uint8))


def main(url: str) -> None:
    options = {"base_url": url, "experiment_dir": Path("log").absolute(), **_SHORTER}
    sys.argv = ["train", *(f"{key}={value}" for key, value in options.items())]
    runpy.run_module("tinker_cookbook.recipes.vlm_classifier.train", run_name="__main__")


if __name__ == "__main__":
    confine()
    main(*sys.argv[1:])
