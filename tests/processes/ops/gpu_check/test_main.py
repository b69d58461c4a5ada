"""The whole check of a tiny model on a CPU, and the imports of the check itself."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from ops.gpu_check import training

DEADLINE_S = 600


def test_a_check_writes_the_steps_of_every_batch_on_both_sides_and_serves_the_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ops.gpu_check", "--suites", "handover", "--sizes", "tiny", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    report = json.loads((tmp_path / "gpu.json").read_text())
    figures = report["figures"]
    assert figures["device"]["product_flops"] > 0 and report["versions"]["torch"]
    own, bare = figures["tiny"][training.TINSMITH], figures["tiny"][training.PEFT]
    assert [*own] == [*training.lengths("tiny")] and [*bare] == [*own][:3]
    assert all(min(row["step_s"]) > 0 for row in (*own.values(), *bare.values()))
    assert report["met"] == (done.returncode == 0), done.stderr[-3000:]
    assert figures["handover"]["added_ms"]["count"] == figures["handover"]["rounds"] > 0
    assert len(report["goals"]) == len(bare) + 2


def test_a_check_that_is_ended_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ops.gpu_check", "--suites", "--sizes", "tiny", "--out", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as check:
        this = psutil.Process(check.pid)
        while not (children := this.children(recursive=True)):
            assert check.poll() is None
            time.sleep(0.1)
        check.terminate()
        assert check.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert not [child for child in children if child.is_running()]


def test_the_check_itself_needs_no_package_of_a_stack() -> None:
    needed = "import sys, ops.gpu_check.__main__; print(*{'tinker', 'celery', 'flask', 'deepspeed'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", needed], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert done.stdout.strip() == ""
