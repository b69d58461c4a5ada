"""A command leaves no process behind, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
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
def test_a_command_that_takes_too_long_or_fails_leaves_no_child(
    end: str, code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, wait = DEADLINE_S if code else 1, subprocess.Popen.wait

    def wait_from_its_child_on(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        """However slow the machine is, the command has its child before it takes too long."""
        while process.poll() is None and not os.fstat(output.fileno()).st_size:
            time.sleep(0.01)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_from_its_child_on)
    with tempfile.TemporaryFile() as output:
        assert processes.run([sys.executable, "-c", CHILD + end], seconds, output) == code
        output.seek(0)
        child = int(output.read())
    ends = time.monotonic() + DEADLINE_S
    while _runs(child):
        assert time.monotonic() < ends
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def test_a_command_has_its_exit_code_and_its_messages(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('figures'); sys.exit('no GPU')"]
    with (tmp_path / "out").open("wb") as output, (tmp_path / "err").open("wb") as messages:
        assert processes.run(command, DEADLINE_S, output, messages) == 1
    assert ((tmp_path / "out").read_text(), (tmp_path / "err").read_text()) == ("figures\n", "no GPU\n")
