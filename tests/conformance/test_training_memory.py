"""An Op that exceeds memory fails alone, and the trainer goes on. It runs in a process with a memory limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import tiny_qwen3

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
