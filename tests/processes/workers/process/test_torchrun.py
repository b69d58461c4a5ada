"""The exit code of a rank that finds the setup wrong is the exit code of torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, time
if os.environ["RANK"] == "1":
    os._exit({code})
time.sleep(600)
"""


@pytest.mark.parametrize(("code", "ends"), [(2, 2), (3, 3), (7, 1)])
def test_the_group_ends_with_what_its_rank_found(code: int, ends: int, tmp_path: Path):
    program = tmp_path / "rank.py"
    program.write_text(PROGRAM.format(code=code))
    launcher = [sys.executable, "-m", "workers.process.torchrun", "--nproc-per-node", "2", str(program)]
    assert subprocess.run(launcher, capture_output=True, timeout=120).returncode == ends
