"""A bench of a whole stack on one device: `python -m ops.gpu_check.serving NAME SIZE MODEL FOLDER`.

Makes the model of SIZE in the folder MODEL, runs the stack with its data in FOLDER, and prints the bench's figures and
goals as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from app.settings import BaseModelSettings, SamplerSettings, TrainerSettings
from ops.bench import handover, models, sampling
from ops.bench.bare_sampler import TOKENS
from ops.bench.report import Outcome
from ops.gpu_check import shapes, suites
from ops.gpu_check.device import device

_HANDOVER_MS = 500.0
# Rounds of sampling, and tokens a sample. On a GPU 64 steps of a small model take some 0.3 s, so the bench would time
# the client's calls.
_SAMPLING = {"cuda": (3, 1024), "cpu": (10, TOKENS)}
# So that 8B fits in a worker's share of 80 GB: of the 24 GB its weights take 16.4. The model's own context and adapters
# of the default rank, 128, would need more than the rest.
_CONTEXT = 4096


BENCHES: Mapping[str, Callable[[Path, BaseModelSettings], Outcome]] = {
    "handover": partial(handover.measured, goal_ms=_HANDOVER_MS),
    "sampling": lambda folder, base: sampling.measured(folder, base, *_SAMPLING[device().type]),
}


def main(name: str, size: str, model: str, folder: str) -> None:
    shapes.save(size, Path(model), device())
    torch.cuda.empty_cache()  # this process goes on beside the stack
    models.write_tokenizer(Path(model))
    Path(folder).mkdir(parents=True, exist_ok=True)
    outcome = BENCHES[name](Path(folder), _base(model))
    print(json.dumps({**outcome.figures, "goals": [asdict(goal) for goal in outcome.goals]}))


def _base(model: str) -> BaseModelSettings:
    return BaseModelSettings(
        name="gpu-check/random",
        path=model,
        max_context=_CONTEXT,
        max_rank=shapes.RANK,
        trainer=TrainerSettings(memory_share=suites.SHARE),
        sampler=SamplerSettings(memory_share=suites.SHARE),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
