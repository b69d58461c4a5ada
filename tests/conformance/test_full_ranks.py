"""Full fine-tuning on two DeepSpeed ranks matches one process of plain torch, at every ZeRO stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.settings import BaseModelSettings
from tests.conformance import full_ranks
from tests.conformance.groups import run_group
from tests.conformance.training_ranks import BY_ONE, SFT, STEP, resume
from tests.models import tiny_qwen3
from tests.parity import architectures
from tests.parity.reference import relative_error
from workers.backends.training import backends
from workers.backends.training.base import Create
from workers.backends.training.trainer import Trainer


@pytest.fixture(scope="module")
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, or the case of tests/parity/architectures.py that a test names."""
    folder = tmp_path_factory.mktemp("base")
    return architectures.build(request.param, folder) if hasattr(request, "param") else tiny_qwen3(folder)


@pytest.fixture(scope="module")
def alone(base: Path) -> Trainer:
    torch.set_num_threads(1)
    backend = backends.create(settings(base, backend="torch"), full=True)
    backend.open()
    return backend


@pytest.fixture(scope="module")
def wanted(alone: Trainer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return full_ranks.run(alone, tmp_path_factory.mktemp("alone") / "checkpoint")


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (1, False), (2, True), (3, True)])
def test_two_ranks_equal_one_process(
    base: Path, alone: Trainer, wanted: dict[str, np.ndarray], tmp_path: Path, stage: int, offload: bool
) -> None:
    check_two_ranks(base, alone, wanted, tmp_path, stage, offload=offload)
    described = json.loads((tmp_path / "described.json").read_text())
    assert (described["zero_stage"], described["ranks"]) == (stage, 2)
    assert (described["base_elements_held"] == 0) == (stage == 3)
    # From stage 1 on a rank holds only its share; half of these weights are in one tensor.
    assert described["held"] == 1 if stage == 0 else 0.3 < described["held"] < 0.7


@pytest.mark.parametrize("base", ["qwen3.5"], indirect=True)
def test_two_ranks_equal_one_process_on_a_model_with_a_recurrent_state(
    base: Path, alone: Trainer, wanted: dict[str, np.ndarray], tmp_path: Path
) -> None:
    check_two_ranks(base, alone, wanted, tmp_path, stage=3)


def test_a_copy_for_a_sampler_travels_in_the_precision_that_it_is_saved_in(base: Path, tmp_path: Path) -> None:
    ranks = settings(base, zero_stage=2, ranks=2).model_copy(update={"dtype": "bfloat16"}).model_dump_json()
    assert run_group(full_ranks.copy_for_a_sampler, ranks, str(tmp_path)) == [0, 0]


def check_two_ranks(
    base: Path, alone: Trainer, wanted: dict[str, np.ndarray], tmp_path: Path, stage: int, *, offload: bool = False
) -> None:
    alone.apply({"d": Create(None)})
    for op in (SFT, STEP):
        alone.apply({"d": op})
    (tmp_path / BY_ONE).mkdir()
    alone.capture("d", optimizer=True)(tmp_path / BY_ONE)
    ranks = settings(base, zero_stage=stage, ranks=2, offload=offload).model_dump_json()
    assert run_group(full_ranks.main, ranks, str(tmp_path)) == [0, 0]
    with np.load(tmp_path / "found.npz") as stored:
        found = dict(stored)

    check_resumed(alone, tmp_path / BY_ONE, "d", found)
    check_resumed(alone, tmp_path / "checkpoint", "b", found)
    # Rank 0 reports the gradients it holds.
    here = {name for name in wanted if name in found or not name.startswith("grad")}
    assert (len(here) == len(wanted)) == (stage == 0)
    first = {name: wanted[name] for name in here if name.startswith(("turn 0", "grad 0", "step 0"))}
    assert relative_error({name: found[name] for name in first}, first) < 1e-5
    # Adam divides a gradient by its own size, so rounding in tiny gradients grows with every step.
    assert relative_error({name: found[name] for name in here}, {name: wanted[name] for name in here}) < 1e-3


def settings(base: Path, **trainer: Any) -> BaseModelSettings:
    trainer = {"micro_batch_tokens": 64, **trainer}
    return BaseModelSettings(name="tiny", path=str(base), dtype="float32", trainer=trainer)


def check_resumed(alone: Trainer, folder: Path, model: str, found: dict[str, np.ndarray]) -> None:
    """One process and two ranks resume a checkpoint with the same results.

    This holds for checkpoints and optimizer states written by either of them. The loss is measured beside the sum of
    its tokens' absolute losses, because those of either sign cancel: 1.1 is left of 301 for qwen3.5.
    """
    alone.apply({model: Create(None, source=folder, optimizer=True)})
    resumed = resume(alone, model)
    loss = resumed.pop(f"resumed {model}  loss:sum")
    assert relative_error({name: found[name] for name in resumed}, resumed) < 1e-5
    size = np.abs(SFT.batch.inputs["weights"].values * resumed[f"resumed {model}  scores"]).sum()
    assert abs(found[f"resumed {model}  loss:sum"] - loss) < 1e-6 * size
