"""An Op that exceeds memory fails alone, and the trainer goes on. It runs in a process with a memory limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from app.domain.ops import LoraSpec
from app.settings import BaseModelSettings, TrainerSettings
from tests.conformance import training_memory
from tests.conformance.groups import run_group
from tests.models import tiny_qwen3
from tests.parity import architectures
from tests.parity.reference import relative_error
from workers.backends.training import backends
from workers.backends.training.base import Create
from workers.backends.training.engine import EngineLost

ROOT = Path(__file__).parents[2]
DEADLINE_S = 600


@pytest.mark.parametrize("stage", [None, 3])
def test_an_op_too_large_for_memory_fails_alone_and_changes_nothing(tmp_path: Path, stage: int | None) -> None:
    base = tiny_qwen3(tmp_path / "base")
    trainer = "torch" if stage is None else f"zero-{stage}"
    command = [sys.executable, "-m", "tests.conformance.training_memory", str(base), trainer]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (done.returncode, done.stdout.split("\n")[-2:]) == (0, ["as if never sent", ""]), done.stderr[-3000:]


@pytest.mark.parametrize(
    ("case", "again"),
    [("llama", False), ("llama", True), ("qwen3-moe", False), ("qwen3-moe", True), ("gpt-oss", False)],
    ids=["llama", "llama computed again", "experts", "experts computed again", "gpt-oss"],
)
def test_a_rank_holds_no_weights_of_other_ranks_until_the_backward_pass(case: str, again: bool, tmp_path: Path) -> None:
    base = architectures.build(case, tmp_path / "base")
    trainer = {"backend": "deepspeed", "zero_stage": 3, "ranks": 2, "activation_checkpointing": again}
    settings = BaseModelSettings(name="tiny", path=str(base), dtype="float32", trainer=trainer)
    assert run_group(training_memory.gathered, settings.model_dump_json(), str(tmp_path / "found.npz")) == [0, 0]
    alone = backends.create(settings.model_copy(update={"trainer": TrainerSettings(backend="torch")}))
    alone.open()
    alone.apply({"m": Create(LoraSpec(rank=4, seed=1))})
    alone.apply({"m": training_memory.GOOD})
    assert relative_error(np.load(tmp_path / "found.npz"), alone.gradients("m")) < 1e-5


def test_a_trainer_ends_when_memory_ran_out_while_deepspeed_brought_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed cannot bring such a weight again, so every later pass would fail. A new process can."""
    trainer = {"backend": "deepspeed", "zero_stage": 3, "offload": True}
    base = tiny_qwen3(tmp_path / "base")
    backend = backends.create(BaseModelSettings(name="tiny", path=str(base), dtype="float32", trainer=trainer))
    backend.open()
    backend.apply({"m": Create(LoraSpec(rank=4))})
    handles = "deepspeed.runtime.zero.partition_parameters.NoGatherHandle.__init__"
    with monkeypatch.context() as patch, pytest.raises(EngineLost):
        patch.setattr(handles, Mock(side_effect=torch.OutOfMemoryError))
        backend.apply({"m": training_memory.GOOD})
    assert not backend.healthy()


@pytest.mark.parametrize("full", ["", "full"])
def test_an_op_too_large_for_one_of_two_ranks_fails_alone_on_both(tmp_path: Path, full: str) -> None:
    trainer = {"backend": "deepspeed", "zero_stage": 2, "ranks": 2, "micro_batch_tokens": training_memory.BUDGET}
    base = tiny_qwen3(tmp_path / "base")
    settings = BaseModelSettings(name="tiny", path=str(base), dtype="float32", trainer=trainer)
    assert run_group(training_memory.one_of_two, settings.model_dump_json(), full) == [0, 0]


def test_a_call_other_than_a_pass_that_is_too_large_for_one_of_two_ranks_fails_alone_on_both(tmp_path: Path) -> None:
    """Before it fails, the idle models leave the device, and the call runs again."""
    trainer = {"backend": "deepspeed", "zero_stage": 2, "ranks": 2}
    settings = BaseModelSettings(name="tiny", path=str(tiny_qwen3(tmp_path / "base")), dtype="float32", trainer=trainer)
    assert run_group(training_memory.calls_of_two, settings.model_dump_json(), str(tmp_path)) == [0, 0]
