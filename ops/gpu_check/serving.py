"""A bench of a whole stack, trainer and sampler on the same device: `python -m ops.gpu_check.serving NAME SIZE FOLDER`.

Makes the model of SIZE in FOLDER and prints the bench's figures and goals as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

from app.settings import BaseModelSettings, SamplerSettings, TrainerSettings
from ops.bench import handover, models, sampling
from ops.bench.bare_sampler import TOKENS
from ops.bench.report import Outcome
from ops.gpu_check import shapes
from ops.gpu_check.device import device

_HANDOVER_MS = 500.0
# Rounds of sampling, and tokens a sample. On a GPU 64 steps of a small model take some 0.3 s, so the bench would time
# the client's calls.
_SAMPLING = {"cuda": (3, 1024), "cpu": (10, TOKENS)}
# Of the device's memory: for the trainer, the sampler, and the bare side beside them.
_SHARE = 0.3


BENCHES: Mapping[str, Callable[[Path, BaseModelSettings], Outcome]] = {
    "handover": partial(handover.measured, goal_ms=_HANDOVER_MS),
    "sampling": lambda folder, base: sampling.measured(folder, base, *_SAMPLING[device().type]),
}


def main(name: str, size: str, folder: str) -> None:
    path = Path(folder) / "base"
    shapes.save(size, path, device())
    models.write_tokenizer(path)
    base = BaseModelSettings(
        name="gpu-check/random",
        path=str(path),
        trainer=TrainerSettings(memory_share=_SHARE),
        sampler=SamplerSettings(memory_share=_SHARE),
    )
    outcome = BENCHES[name](Path(folder), base)
    print(json.dumps({**outcome.figures, "goals": [asdict(goal) for goal in outcome.goals]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
