"""Program of test_full_ranks.py: one scenario of full fine-tuning, in one process or in each rank of a group."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from app.domain.ops import DropGradients
from app.domain.results import Done, OptimStepOutput
from app.errors import UserOpError
from app.settings import BaseModelSettings
from tests.conformance.training_ranks import (
    BY_ONE,
    SFT,
    SHORT,
    STEP,
    VALUED,
    bad,
    capture_and_go_on,
    check_snapshot,
    note,
    resume,
)
from workers.backends.training import backends, ranks
from workers.backends.training.base import Create, Load
from workers.backends.training.states.full import FullFinetuneState
from workers.backends.training.trainer import Trainer
from workers.models.full_weights import tensors_in


def run(backend: Trainer, folder: Path) -> dict[str, np.ndarray]:
    """Runs two models in alternation, through every kind of Op, after a critic. Returns the results by name."""
    found = criticize(backend)
    backend.apply({"a": Create(None)})
    backend.apply({"b": Create(None)})
    for turn, (model, op) in enumerate((("a", SFT), ("b", SHORT), ("a", SHORT))):
        note(found, f"turn {turn}", backend.apply({model: op}))
        assert isinstance(backend.apply({model: bad()})[model], UserOpError)
        found |= {f"grad {turn} {name}": g for name, g in backend.gradients(model).items()}
        (stepped,) = backend.apply({model: STEP}).values()
        assert isinstance(stepped, OptimStepOutput), stepped
        found |= {f"step {turn} {name}": np.array(value) for name, value in stepped.metrics.items()}
        note(found, f"look {turn}", backend.apply({model: replace(SFT, forward_only=True)}))
    backend.apply({"b": SFT})
    check_snapshot(backend, "b", folder.with_name("between gradients"), None)
    backend.apply({"b": SFT})
    backend.apply({"b": DropGradients()})
    folder.mkdir()
    backend.capture("a", optimizer=True)(folder)
    capture_and_go_on(backend, folder)
    backend.apply({"b": Load(folder, optimizer=True)})
    backend.close("a")
    found |= resume(backend, "b")
    by_one = folder.with_name(BY_ONE)
    if by_one.exists():
        backend.apply({"d": Create(None, source=by_one, optimizer=True)})
        found |= resume(backend, "d")
        backend.close("d")
    return found


def criticize(backend: Trainer) -> dict[str, np.ndarray]:
    """Runs a critic's first Op and step; returns its values after them."""
    found: dict[str, np.ndarray] = {}
    assert backend.apply({"v": Create(None, critic=True)}) == {"v": Done()}
    note(found, "turn 0", backend.apply({"v": VALUED}))
    found |= {f"grad 0 v {name}": g for name, g in backend.gradients("v").items()}
    backend.apply({"v": STEP})
    note(found, "look 0", backend.apply({"v": replace(VALUED, forward_only=True)}))
    backend.close("v")
    return found


def held_share(backend: Trainer) -> float:
    """Number of elements of all fp32 masters in this rank's memory."""
    (masters,) = (state.masters.values() for state in backend._states.values() if isinstance(state, FullFinetuneState))
    return sum(m.numel() for m in masters if not m.is_meta) / sum(m.numel() for m in masters)


def copy_for_a_sampler(settings: str, folder: str) -> None:
    """Rank 0 copies a bf16 model for a sampler, while the engine holds it and while it holds another one.

    Nothing travels in fp32, or at all if the engine holds the model. The files have the rounded masters.
    """
    torch.set_num_threads(1)
    backend = backends.create(BaseModelSettings.model_validate_json(settings), full=True)
    backend.open()  # together
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as sent:
        if os.environ["RANK"] != "0":
            backend.follow()
            ranks.end()
        for op in (Create(None), SFT, STEP):
            backend.apply({"a": op})
        writers = {}
        for holds, dtypes in (("a", set()), ("b", {torch.bfloat16})):
            if holds == "b":
                for op in (Create(None), SFT):
                    backend.apply({"b": op})
            sent.reset_mock()
            writers[holds] = backend.capture("a", optimizer=False)
            # Ranks of this group send each other messages as bytes.
            assert {call.args[0].dtype for call in sent.mock_calls} - {torch.int64, torch.uint8} == dtypes
    masters = Path(folder) / "masters"
    backend.capture("a", optimizer=True)(masters)
    wanted = {name: tensor.bfloat16() for name, tensor in tensors_in(masters)}
    for holds, write in writers.items():
        write(Path(folder) / holds)
        found = dict(tensors_in(Path(folder) / holds))
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    backend.shutdown()
    ranks.end()


def main(settings: str, folder: str) -> None:
    torch.set_num_threads(1)
    backend = backends.create(BaseModelSettings.model_validate_json(settings), full=True)
    backend.open()  # together
    if os.environ["RANK"] != "0":
        backend.follow()
        ranks.end()
    found = run(backend, Path(folder) / "checkpoint")
    (Path(folder) / "described.json").write_text(json.dumps({**backend.describe(), "held": held_share(backend)}))
    np.savez(Path(folder) / "found.npz", **found)
    backend.shutdown()
    ranks.end()
