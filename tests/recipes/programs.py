"""The cookbook's own programs, run in sequence in one process. Command-line arguments alone point them at the server.

    python -m tests.recipes.programs URL BASE_MODEL SIZE

The working directory holds the data (data.py); each recipe logs into a folder of its own name there.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.confined import confine

Arguments = dict[str, object]


@dataclass(frozen=True)
class Size:
    """Amount of work of each recipe; lengths in tokens."""

    steps: int
    batch: int
    group: int
    sampled: int
    longest: int
    rank: int
    learning_rate: float


SIZES = {
    "short": Size(steps=4, batch=4, group=4, sampled=5, longest=256, rank=8, learning_rate=1e-2),
    "long": Size(steps=10, batch=16, group=8, sampled=16, longest=512, rank=16, learning_rate=5e-4),
}


def chat(_: str, size: Size) -> Arguments:
    """Supervised training on the conversations that come with the cookbook."""
    (cookbook,) = find_spec("tinker_cookbook").submodule_search_locations or ()
    return {
        "dataset": Path(cookbook) / "example_data/conversations.jsonl",
        "batch_size": size.batch,
        "max_length": size.longest,
        "lora_rank": size.rank,
        "lr_schedule": "constant",
    }


def arithmetic(_: str, size: Size) -> Arguments:
    """The recipe's default loss, stable_reinforce, has no published formula (docs/losses.md)."""
    return {
        "env": "arithmetic",
        "groups_per_batch": size.batch,
        "group_size": size.group,
        "max_tokens": size.sampled,
        "lora_rank": size.rank,
        "loss_fn": "importance_sampling",
    }


def preferences(_: str, size: Size) -> Arguments:
    return {"dataset": "hhh", "batch_size": size.batch, "max_length": size.longest, "lr_schedule": "constant"}


def distillation(base: str, size: Size) -> Arguments:
    """Distillation from the teacher that `chat` trained."""
    return {
        "dataset": "deepmath",
        "teacher_model": base,
        "groups_per_batch": size.batch,
        "group_size": size.group,
        "max_tokens": size.sampled,
        "lora_rank": size.rank,
        "teacher_checkpoint": last_checkpoint(Path("chat"))["sampler_path"],
    }


RECIPES: dict[str, tuple[str, Callable[[str, Size], Arguments]]] = {
    "chat": ("chat_sl.train", chat),
    "arithmetic": ("math_rl.train", arithmetic),
    "preferences": ("preference.dpo.train", preferences),
    "distillation": ("distillation.on_policy_distillation", distillation),
}
METRICS = {
    "chat": "train_mean_nll",
    "arithmetic": "env/all/reward/total",
    "preferences": "dpo_loss",
    "distillation": "teacher_kl",
}


def last_checkpoint(log: Path) -> dict[str, Any]:
    """Fields of the last checkpoint: state_path and sampler_path, among others."""
    return rows(log / "checkpoints.jsonl")[-1]


def metrics(log: Path, name: str) -> list[float]:
    """Returns one value per step."""
    return [row[name] for row in rows(log / "metrics.jsonl") if name in row]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(url: str, base: str, size_name: str) -> None:
    size = SIZES[size_name]
    common = {"base_url": url, "model_name": base, "renderer_name": "role_colon"}
    rates = {"learning_rate": size.learning_rate, "max_steps": size.steps}
    for name, (module, arguments) in RECIPES.items():
        asked = {**common, **rates, "log_path": Path(name).absolute(), **arguments(base, size)}
        sys.argv = [module, *(f"{key}={value}" for key, value in asked.items())]
        runpy.run_module(f"tinker_cookbook.recipes.{module}", run_name="__main__")


if __name__ == "__main__":
    confine()
    main(*sys.argv[1:])
