"""Cross-model batching of eight tenants in one pass, with small batches and with full ones.

Small batches are compared with one tenant's batch eight times as large, full ones with eight passes one by one.

`python -m ops.bench.merged BASE_MODEL_JSON` is the side that measures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

from app.domain.ops import ForwardBackward
from app.settings import BaseModelSettings
from ops.bench import batches, models, side, timing
from ops.bench.bare_trainer import BareTrainer
from ops.bench.report import Goal, Outcome

_TENANTS = 8
_SMALL, _FULL = 64, 256
_FULL_ROWS = 4
_RANK = 16
_GOALS = {"small": 0.9, "full": 0.95}
_ROUNDS = {"small": 12, "full": 4}
Samples = dict[str, list[float]]


def run(folder: Path) -> Outcome:
    base = models.bundled().model_dump_json()
    found: Samples = side.measured("ops.bench.merged", base, folder / "side.log", max(_ROUNDS.values()))
    tokens = {"small": _TENANTS * _SMALL, "full": _TENANTS * _FULL_ROWS * _FULL}
    ratios = {
        "small": min(found["one tenant"]) / min(found["eight tenants"]),
        "full": min(found["one after another"]) / min(found["together"]),
    }
    figures = {
        "rounds": _ROUNDS,
        "threads": side.CORES,
        "small": _figures(tokens["small"], found, "eight tenants", "one tenant"),
        "full": _figures(tokens["full"], found, "together", "one after another"),
    }
    goals = (
        Goal("eight tenants' 1 x 64 over one's 8 x 64 tokens/s", ratios["small"], "at_least", _GOALS["small"], ""),
        Goal("eight full batches: together over in turn", ratios["full"], "at_least", _GOALS["full"], ""),
    )
    return Outcome(figures, goals)


def _figures(tokens: int, found: Samples, merged: str, alone: str) -> dict[str, object]:
    return {
        **{f"{name}_tokens_per_s".replace(" ", "_"): batches.rates(tokens, found[name]) for name in (merged, alone)},
        "ratio": {
            "best": min(found[alone]) / min(found[merged]),
            "median_round": median(b / a for a, b in zip(found[merged], found[alone], strict=True)),
        },
    }


def prepare() -> Callable[[int], Samples]:
    """Returns measure(count): ms of the forward_backward on each side, in turns; `full` batches run in fewer rounds."""
    settings = BaseModelSettings.model_validate_json(sys.argv[1])
    trainer = BareTrainer(settings, models=_TENANTS, rank=_RANK)
    vocab_size = 1000
    one, eight = (batches.random_tokens(rows, _SMALL, vocab_size) for rows in (1, _TENANTS))
    full = batches.operation(batches.random_tokens(_FULL_ROWS, _FULL, vocab_size))

    def everyone(op: ForwardBackward) -> dict[str, ForwardBackward]:
        return {f"m{i}": op for i in range(_TENANTS)}

    small_sides = {
        "eight tenants": lambda: trainer.timed_ms(everyone(batches.operation(one))),
        "one tenant": lambda: trainer.timed_ms({"m0": batches.operation(eight)}),
    }
    full_sides = {
        "together": lambda: trainer.timed_ms(everyone(full)),
        "one after another": lambda: trainer.timed_ms(*({name: op} for name, op in everyone(full).items())),
    }

    def measure(count: int) -> Samples:
        fewer = min(count, _ROUNDS["full"])
        return timing.alternate(count, small_sides) | timing.alternate(fewer, full_sides)

    return measure


if __name__ == "__main__":
    side.serve(prepare)
