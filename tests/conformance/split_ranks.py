"""Program of test_tensor_parallel.py: two trained adapters in one pass, a step, and the files written after it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

from app.domain.ops import AdamParams, LoraSpec, OptimStep
from app.settings import BaseModelSettings
from tests.conformance.training_ranks import RL, SFT, note
from workers.backends.training import backends, ranks
from workers.backends.training.base import Create
from workers.backends.training.ranks import RankGroup
from workers.backends.training.trainer import Trainer
from workers.models import lora, peft_files

# Without a great eps, Adam would divide tiny gradients, and their rounding, by themselves.
STEP = OptimStep(AdamParams(learning_rate=1e-2, eps=1e-2, grad_clip_norm=5.0))
SPECS = {"a": LoraSpec(rank=4, seed=1), "b": LoraSpec(rank=8, seed=2, train_unembed=False)}


def write_trained(backend: Trainer, folder: Path) -> None:
    """Writes adapters whose A and B are both random, so that each tensor has a gradient."""
    for name, spec in SPECS.items():
        adapter = lora.new_adapter(backend._engine.base.model, spec)
        generator = torch.Generator().manual_seed(spec.seed)
        for pair in adapter.pairs.values():
            pair.b.data.normal_(0.0, 0.1, generator=generator)
        (folder / name).mkdir(parents=True)
        peft_files.write(adapter, folder / name, "base", backend._engine.base.model)


def run(backend: Trainer, trained: Path, folder: Path) -> dict[str, np.ndarray]:
    """Returns scores, losses, gradients, and the tensors of a capture and an export, by name."""
    found: dict[str, np.ndarray] = {}
    backend.apply({name: Create(spec, source=trained / name) for name, spec in SPECS.items()})
    note(found, "before", backend.apply({"a": SFT, "b": RL}))
    for model in SPECS:
        found |= {f"grad {model} {name}": g for name, g in backend.gradients(model).items()}
    backend.apply(dict.fromkeys(SPECS, STEP))
    note(found, "after", backend.apply({"a": replace(SFT, forward_only=True)}))
    for kind, write in (("captured", backend.capture("a", optimizer=True)), ("exported", backend.export("a"))):
        (folder / kind).mkdir(parents=True)
        write(folder / kind)
        files = sorted((folder / kind).glob("*.safetensors"))
        found |= {f"{kind} {name}": value for file in files for name, value in load_file(file).items()}
    return found


def main(settings: str, folder: str) -> None:
    """Runs it on each base of a list: one after the other, so that an error ends those after it too."""
    torch.set_num_threads(1)
    RankGroup.leave = lambda self: None  # the next backend takes the same default group
    kept = []  # the first one serves the group's store
    for one in map(BaseModelSettings.model_validate, json.loads(settings)):
        kept.append(backends.create(one))
        run_split(kept[-1], Path(folder) / one.name)
    ranks.end()


def run_split(backend: Trainer, folder: Path) -> None:
    backend.open()
    if os.environ["RANK"] != "0":
        return backend.follow()
    found = run(backend, folder / "trained", folder / "split")
    (folder / "describe.json").write_text(json.dumps(backend.describe()))
    np.savez(folder / "found.npz", **found)
    return backend.shutdown()
