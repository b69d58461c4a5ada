"""The bare side of `overhead`: calls a training backend directly. `python -m ops.bench.bare_backend SETTINGS_JSON`"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

from app.domain.ops import OptimStep
from app.settings import BaseModelSettings
from ops.bench import batches, overhead, side, timing
from ops.bench.bare_trainer import BareTrainer


def prepare() -> Callable[[int], dict[str, list[float]]]:
    """Returns measure(count): ms of each forward_backward and optim_step."""
    trainer = BareTrainer(BaseModelSettings.model_validate_json(sys.argv[1]), models=1, rank=overhead.RANK)
    backward, step = batches.operation(overhead.tokens()), OptimStep(batches.ADAM)

    def measure(count: int) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {backward.kind: [], step.kind: []}
        for _ in range(count):
            for op in (backward, step):
                found[op.kind].append(timing.timed_ms(partial(trainer.apply, {"m0": op})))
        return found

    return measure


if __name__ == "__main__":
    side.serve(prepare)
