"""Two ranks with one thread each: the trainer at ZeRO-2 against torch's DistributedDataParallel on the same batches.

SmolLM2-135M-Instruct in bfloat16 with a LoRA adapter on every linear layer, head included. A step has 16 x 256 random
tokens, and each rank computes half of them.

`python -m ops.bench.ddp BASE_MODEL_JSON` is the trainer's side, ddp_loop.py the other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

from app.domain.ops import OptimStep
from app.settings import BaseModelSettings
from ops.bench import batches, models, real_step, side, timing
from ops.bench.bare_trainer import BareTrainer
from ops.bench.report import Goal, Outcome
from workers.backends.training.backends import create

RANKS = 2
_GOAL = 1.0
_ROUNDS = 5


def run(folder: Path) -> Outcome:
    base = models.bundled()
    trainer = base.trainer.model_copy(update={"ranks": RANKS, "zero_stage": 2})
    settings = base.model_copy(update={"trainer": trainer})
    vocab_size = json.loads((Path(base.path) / "config.json").read_text())["vocab_size"]
    with (
        side.threads(1),
        side.running("ops.bench.ddp", settings.model_dump_json(), folder / "ours.log") as ours,
        side.running("ops.bench.ddp_loop", base.path, folder / "ddp.log") as ddp,
    ):
        sides = {"ours": lambda: ours.measure(1)[0], "ddp": lambda: ddp.measure(1)[0]}
        timing.alternate(1, sides)
        found: dict[str, list[float]] = timing.alternate(_ROUNDS, sides)
    tokens = real_step.tokens(vocab_size).size
    ratio = min(found["ddp"]) / min(found["ours"])
    figures = {
        "rounds": _ROUNDS,
        "ranks": RANKS,
        "threads_a_rank": 1,
        "tokens_a_step": tokens,
        "zero_2_tokens_per_s": batches.rates(tokens, found["ours"]),
        "ddp_tokens_per_s": batches.rates(tokens, found["ddp"]),
        "zero_2_over_ddp": {
            "best_step": ratio,
            "median_round": median(b / a for a, b in zip(found["ours"], found["ddp"], strict=True)),
        },
    }
    return Outcome(figures, (Goal("two ranks: ZeRO-2 over torch DDP tokens/s", ratio, "at_least", _GOAL, ""),))


def prepare() -> Callable[[int], list[float]]:
    """Returns measure(count): ms of each forward_backward with its optim_step."""
    trainer = BareTrainer(_settings(), models=1, rank=real_step.RANK)
    backward = batches.operation(real_step.tokens(vocab_size=1000))
    step = OptimStep(batches.ADAM)

    def measure(count: int) -> list[float]:
        return [timing.timed_ms(lambda: trainer.apply({"m0": backward}, {"m0": step})) for _ in range(count)]

    return measure


def _follow() -> None:
    backend = create(_settings())
    backend.open()
    backend.follow()


def _settings() -> BaseModelSettings:
    return BaseModelSettings.model_validate_json(sys.argv[1])


if __name__ == "__main__":
    side.serve_ranks(RANKS, "ops.bench.ddp", prepare, _follow)
