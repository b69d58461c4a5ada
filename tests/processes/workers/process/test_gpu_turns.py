"""A process that is killed holds no turn on the GPUs."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workers.process.gpu_turns import GpuTurns

_WAIT_S = 60.0
_HOLDER = """
import sys, time
from pathlib import Path
from workers.process.gpu_turns import GpuTurns
turns = GpuTurns(Path(sys.argv[1]), lambda: None, lambda: None, 60.0, turn_s=0.0)
with turns.use():
    print("holds", flush=True)
    while turns.held:
        time.sleep(0.01)
    print("gives nothing away", flush=True)
    time.sleep(600)
"""


def test_a_killed_process_holds_no_turn(tmp_path: Path) -> None:
    events: list[str] = []
    command = [sys.executable, "-c", _HOLDER, str(tmp_path / "gpus")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder, ThreadPoolExecutor(1) as pool:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
        turns = GpuTurns(tmp_path / "gpus", lambda: events.append("begins"), lambda: None, _WAIT_S)
        step = pool.submit(_use, turns)
        assert holder.stdout.readline() == "gives nothing away\n"
        assert events == []
        holder.kill()
        step.result(_WAIT_S)
    assert events == ["begins"]
    turns.close()


def _use(turns: GpuTurns) -> None:
    with turns.use():
        pass
