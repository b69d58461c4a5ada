"""Peak memory of a trainer process over a forward_backward of 16 x 256 tokens, base model and libraries included.

`python -m ops.bench.memory BASE_MODEL_JSON` is the side that measures.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path

from app.settings import BaseModelSettings
from ops.bench import batches, models, real_step, side
from ops.bench.bare_trainer import BareTrainer
from ops.bench.report import Goal, Outcome

_GOAL_GB = 3.0


def run(folder: Path) -> Outcome:
    base = models.bundled()
    again = base.trainer.model_copy(update={"activation_checkpointing": True})
    found = {
        "default": _measured(base, folder / "default.log"),
        "activation_checkpointing": _measured(base.model_copy(update={"trainer": again}), folder / "again.log"),
    }
    figures = {"threads": side.CORES, "micro_batch_tokens": base.trainer.micro_batch_tokens, "peak_gb": found}
    return Outcome(figures, (Goal("peak memory, 16 x 256", found["default"]["pass"], "at_most", _GOAL_GB, "GB"),))


def _measured(base: BaseModelSettings, log: Path) -> dict[str, float]:
    with side.threads(side.CORES), side.running("ops.bench.memory", base.model_dump_json(), log) as trainer:
        found: dict[str, float] = trainer.measure(2)
        return found


def prepare() -> Callable[[int], dict[str, float]]:
    """Returns measure(count): the process's peak in GB before `count` passes, and over them."""
    settings = BaseModelSettings.model_validate_json(sys.argv[1])
    trainer = BareTrainer(settings, models=1, rank=real_step.RANK)
    op = batches.operation(real_step.tokens(vocab_size=1000))
    before = _peak_gb()

    def measure(count: int) -> dict[str, float]:
        for _ in range(count):
            trainer.apply({"m0": op})
        return {"loaded": before, "pass": _peak_gb()}

    return measure


def _peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    side.serve(prepare)
