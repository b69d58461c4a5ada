"""Two ranks of a full fine-tune at ZeRO stage 2 or 3 sum a layer's gradient when the backward pass leaves the layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from app.settings import BaseModelSettings
from tests.conformance import full_gradients
from tests.conformance.groups import run_group
from tests.models import tiny_qwen3
from tests.parity.reference import relative_error

LAYERS = 6


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("base"), num_hidden_layers=LAYERS)


@pytest.mark.parametrize(("stage", "again"), [(2, "auto"), (3, True)])
def test_no_rank_holds_the_gradients_of_two_layers(base: Path, tmp_path: Path, stage: int, again: Any) -> None:
    ranks = settings(base, backend="deepspeed", zero_stage=stage, ranks=2, activation_checkpointing=again)
    assert run_group(full_gradients.watched, ranks, str(tmp_path)) == [0, 0]
    sizes = {name: 4 * weight.numel() for name, weight in load_file(base / "model.safetensors").items()}
    of_layer = sum(size for name, size in sizes.items() if name.startswith("model.layers.0."))
    others = sum(size for name, size in sizes.items() if not name.startswith("model.layers."))
    for rank in range(2):
        peak = json.loads((tmp_path / f"{rank}.json").read_text())
        assert of_layer <= peak < 2 * of_layer + others
    wanted = full_gradients.gradients(full_gradients.opened(settings(base, backend="torch")))
    with np.load(tmp_path / "found.npz") as found:
        assert relative_error(dict(found), {name: wanted[name] for name in found}) < 1e-5


def test_an_op_that_runs_out_of_memory_fails_on_both_ranks_and_a_late_gradient_ends_the_trainer(base: Path) -> None:
    ranks = settings(base, backend="deepspeed", zero_stage=2, ranks=2)
    assert run_group(full_gradients.fails_midway, ranks) == [0, 0]


def settings(base: Path, **trainer: Any) -> str:
    trainer = {"micro_batch_tokens": 64, **trainer}
    return BaseModelSettings(name="tiny", path=str(base), dtype="float32", trainer=trainer).model_dump_json()
