"""An Op that exceeds memory fails alone, and the trainer goes on: in a process with a memory limit. And a base larger
than the memory of one rank is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.settings import BaseModelSettings
from tests.conformance import zero_loading
from tests.conformance.groups import run_group
from tests.models import tiny_qwen3
from tests.parity.architectures import build

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


def test_no_rank_of_stage_3_holds_the_whole_base_while_it_loads(tmp_path: Path) -> None:
    """667 MB. One of the two ranks took 1,009 MB when each read all weights and DeepSpeed split them afterwards."""
    base = build("qwen3", tmp_path / "base", hidden_size=1024, intermediate_size=4096, num_hidden_layers=13)
    whole = (base / "model.safetensors").stat().st_size
    trainer = {"backend": "deepspeed", "zero_stage": 3, "ranks": 2}
    settings = BaseModelSettings(name="large", path=str(base), dtype="float32", trainer=trainer)
    assert run_group(zero_loading.main, settings.model_dump_json(), str(tmp_path)) == [0, 0]
    most = [int((tmp_path / rank).read_text()) for rank in "01"]
    assert whole / 2 < min(most) and max(most) < whole, (most, whole)
