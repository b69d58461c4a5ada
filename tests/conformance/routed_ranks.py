"""Program of test_sequence_parallel.py and test_tensor_parallel.py: Ops with routes, in one process or in each rank of
a group.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from app.domain.ops import ForwardBackward, LoraSpec, Ragged
from app.domain.results import ForwardBackwardOutput
from app.domain.routes import none_of
from app.settings import BaseModelSettings
from tests.parity.datums import batch, supervised
from workers.backends.training import backends, ranks
from workers.backends.training.base import Create
from workers.backends.training.trainer import Trainer

LAYERS, EXPERTS, TOP_K = 2, 4, 2
LENGTHS = {"a": (9, 30, 4, 23), "b": (17, 6)}


def run(backend: Trainer) -> dict[str, np.ndarray]:
    """Runs two tenants in one pass, with routes and without. Returns the logprobs, the loads of the experts and the
    gradients by name."""
    found: dict[str, np.ndarray] = {}
    backend.apply({"a": Create(LoraSpec(rank=4, seed=1)), "b": Create(LoraSpec(rank=8, seed=2))})
    for name, ops in (("routed", {model: routed(model) for model in LENGTHS}), ("plain", {"a": plain("a")})):
        for model, output in backend.apply(ops).items():
            assert isinstance(output, ForwardBackwardOutput), output
            found[f"{name} {model} logprobs"] = output.logprobs.values
            found[f"{name} {model} load"] = np.array([v for key, v in output.metrics.items() if key.startswith("e_")])
    return found | {
        f"grad {model} {name}": value for model in LENGTHS for name, value in backend.gradients(model).items()
    }


def plain(model: str) -> ForwardBackward:
    return ForwardBackward(batch(supervised(len(LENGTHS[model]), LENGTHS[model])), "cross_entropy")


def routed(model: str) -> ForwardBackward:
    """Random experts for every token but the last of each datum."""
    generator, routes = np.random.default_rng(len(LENGTHS[model])), []
    for length in LENGTHS[model]:
        chosen = generator.random((length, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.uint8)
        chosen[-1] = none_of(chosen.dtype)
        routes.append(chosen)
    op = plain(model)
    return replace(op, batch=replace(op.batch, routes=Ragged.of(routes, np.uint8)))


def main(settings: str, folder: str) -> None:
    torch.set_num_threads(1)
    backend = backends.create(BaseModelSettings.model_validate_json(settings))
    backend.open()  # together
    if os.environ["RANK"] != "0":
        backend.follow()
        ranks.end()
    np.savez(Path(folder) / "found.npz", **run(backend))
    backend.shutdown()
    ranks.end()
