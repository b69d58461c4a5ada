"""The cookbook's programs with their default options, run in sequence in one process.

    python -m tests.recipes.defaults URL SIZE

Only the address of the server is given. The data sets are folders in the working directory (data.py), and the base
models are served under the names that the programs have as defaults (models.py). Each program logs into a folder of its
own name in the working directory. `ended.json` there says how each ended (`Ended`).
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import tinker

from tests.confined import confine
from tests.recipes.programs import metrics

_LOSS = {"loss_fn": "importance_sampling"}
# The RL programs' own loss, stable_reinforce, has no published formula (docs/losses.md).
RECIPES: dict[str, tuple[str, dict[str, str]]] = {
    "supervised loop": ("sl_loop", {}),
    "chat": ("chat_sl.train", {}),
    "preferences": ("preference.dpo.train", {}),
    "distillation": ("distillation.on_policy_distillation", {}),
    "rl loop with its loss": ("rl_loop", {}),
    "rl loop": ("rl_loop", _LOSS),
    "arithmetic with its loss": ("math_rl.train", {}),
    "arithmetic": ("math_rl.train", _LOSS),
}
METRICS = {
    "supervised loop": "train_mean_nll",
    "chat": "train_mean_nll",
    "preferences": "dpo_loss",
    "distillation": "teacher_kl",
    "rl loop": "reward/total",
    "arithmetic": "env/all/reward/total",
}
REFUSED = RECIPES.keys() - METRICS.keys()

STEPS = 2
# Options that make a short run shorter, and change nothing else. A program that is refused has all its defaults.
SHORTER: dict[str, dict[str, int]] = {
    "supervised loop": {"max_steps": STEPS, "batch_size": 32},
    "chat": {"max_steps": STEPS, "batch_size": 16},
    "preferences": {"max_steps": STEPS, "batch_size": 8},
    "distillation": {"max_steps": STEPS, "groups_per_batch": 4, "max_tokens": 16},
    "rl loop": {"max_steps": STEPS, "batch_size": 8, "group_size": 4, "max_tokens": 16},
    "arithmetic": {"max_steps": STEPS, "groups_per_batch": 8},
}


@dataclass(frozen=True)
class Ended:
    """The end of a program: the error, or an empty text; tokens of prompts and samples that were billed meanwhile."""

    error: str
    sampled: int


def ended(folder: Path) -> dict[str, Ended]:
    return {name: Ended(**fields) for name, fields in json.loads((folder / "ended.json").read_text()).items()}


def logged(folder: Path, name: str, metric: str) -> list[float]:
    """One value per step, from the program's own log."""
    (log,) = (folder / name).rglob("metrics.jsonl")
    return metrics(log.parent, metric)


def main(url: str, size: str) -> None:
    done = {}
    for name, (module, options) in RECIPES.items():
        before = _billed(url)
        shorter = SHORTER.get(name, {}) if size == "short" else {}
        error = _run(name, module, {"base_url": url, **options, **shorter})
        done[name] = asdict(Ended(error, _billed(url) - before))
        Path("ended.json").write_text(json.dumps(done))


def _run(name: str, module: str, options: dict[str, Any]) -> str:
    """Runs a program; returns the text of its error, or an empty text."""
    os.environ["TINKER_COOKBOOK_RUNS_DIR"] = str(Path(name).absolute())
    sys.argv = [module, *(f"{key}={value}" for key, value in options.items())]
    try:
        runpy.run_module(f"tinker_cookbook.recipes.{module}", run_name="__main__")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _billed(url: str) -> int:
    """Tokens of prompts and samples in the bills of the last hour and of this one."""
    hour = datetime.fromtimestamp(time.time() // 3600 * 3600, UTC)
    usage = tinker.AdminClient(base_url=url).get_billing_usage(hour - timedelta(hours=1), hour + timedelta(hours=1))
    infos = [event.event_info for event in usage.result().data]
    return sum(info.token_count for info in infos if info.type in ("sampling_prefill", "sampling_sample"))


if __name__ == "__main__":
    confine()
    main(*sys.argv[1:])
