"""A command leaves no process behind, however it ends."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from ops.gpu_check import processes

DEADLINE_S = 600
CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
print(child.pid, flush=True)
"""


@pytest.mark.parametrize(("end", "code"), [("time.sleep(3600)", None), ("sys.exit(3)", 3)])
def test_a_command_that_takes_too_long_or_fails_leaves_no_child(end: str, code: int | None) -> None:
    seconds = DEADLINE_S if code else 5
    with tempfile.TemporaryFile() as output:
        assert processes.run([sys.executable, "-c", CHILD + end], seconds, output) == code
        output.seek(0)
        child = int(output.read())
    ends = time.monotonic() + DEADLINE_S
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_a_command_has_its_exit_code_and_its_messages(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('figures'); sys.exit('no GPU')"]
    with (tmp_path / "out").open("wb") as output, (tmp_path / "err").open("wb") as messages:
        assert processes.run(command, DEADLINE_S, output, messages) == 1
    assert ((tmp_path / "out").read_text(), (tmp_path / "err").read_text()) == ("figures\n", "no GPU\n")
