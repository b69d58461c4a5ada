"""The checks of `make demo`, run on a stand-in that does everything right, and then with each single fault."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.first_hour.demo import COMMAND, HABIT, noise

GOOD = {
    "prompts": ["a?", "b?", "c?"],
    "steps": 3,
    "losses": [4.0, 2.5, 1.0],
    "answers_before": ["A", "B", "C"],
    "answers_after": [f"A. {HABIT}", f"B. {HABIT}", "C"],
}
JUDGE = """
import json, sys
from pathlib import Path
from tests.first_hour import demo
demo._GRACE_S, demo._LIMIT_S = float(sys.argv[3]), float(sys.argv[4])
root = Path(sys.argv[1])
demo._SHARED_MEMORY = root / "shm"  # other tests' files come and go in the real one
faults = list(demo.judge([sys.executable, "-c", sys.argv[2]], root, root / "data"))
print("\\n" + json.dumps(faults))
"""
SETTINGS = """
[api]
port = 1
[redis]
url = "redis://:x@127.0.0.1:1/0"
broker_url = "redis://:x@127.0.0.1:1/0"
"""
# Actions of the stand-in after its results are written.
SLEEPER = "import subprocess, sys; subprocess.Popen(['sleep', '100'], start_new_session=True);"
LISTENER = """
import os, socket
server = socket.create_server(("127.0.0.1", 0))
settings = data / "run" / "settings.toml"
settings.write_text(settings.read_text().replace("port = 1", f"port = {server.getsockname()[1]}"))
server.set_inheritable(True)
if os.fork() == 0:
    os.execvp("sleep", ["sleep", "100"])
"""


def judged(
    tmp_path: Path, then: str = "", result: dict[str, Any] | None = None, limit_s: int = 600, *, leaves: bool = False
) -> list[str]:
    """Faults found in a stand-in for `make demo` that writes these results and runs this code.

    `leaves`: whether a process of it is left. Then the whole grace passes, so it is short: on a busy machine the output
    may come later.
    """
    (tmp_path / "data" / "run").mkdir(parents=True)
    (tmp_path / "data" / "run" / "settings.toml").write_text(SETTINGS)
    (tmp_path / "shm").mkdir()
    program = (
        "from pathlib import Path\ndata = Path('data')\n"
        f"(data / 'demo.json').write_text({json.dumps({**GOOD, **(result or {})})!r})\n"
        f"print('Ready', flush=True)\n{then}"
    )
    judge = [sys.executable, "-c", JUDGE, tmp_path, program, str(1 if leaves else 120), str(limit_s)]
    ran = subprocess.run(judge, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert leaves or ran.stdout.startswith("Ready\n"), "the output is not shown"
    return list(json.loads(ran.stdout.splitlines()[-1]))


def test_a_run_that_does_everything_right_has_no_fault(tmp_path):
    assert judged(tmp_path) == []


@pytest.mark.parametrize(
    ("then", "fault"),
    [
        ("raise SystemExit(3)", "its exit code is 3"),
        ("(data / 'demo.json').unlink()", "its results cannot be read"),
        ("(data / 'run' / 'settings.toml').unlink()", "its ports are not known"),
        ("print('Loading weights:  40%|####  | 10/25 [00:01<00:02, 7.5it/s]')", "a progress bar or warning"),
        ("print('a', end='\\r')", "a progress bar or warning"),
        ("import sys, warnings; warnings.warn('x')", "a progress bar or warning"),
    ],
)
def test_each_thing_done_wrong_is_a_fault(tmp_path, then, fault):
    found = judged(tmp_path, then)
    assert any(line.startswith(fault) for line in found), found


def test_a_process_that_is_left_is_a_fault(tmp_path):
    [found] = judged(tmp_path, SLEEPER, leaves=True)
    assert re.fullmatch(r"process [0-9]+ is left: sleep 100", found)


def test_a_run_that_does_not_end_is_a_fault_and_is_ended(tmp_path):
    found = judged(tmp_path, "import time; time.sleep(1000)", limit_s=3, leaves=True)
    assert "it did not end within 0.05 minutes" in found


def test_a_port_that_is_still_open_is_a_fault(tmp_path):
    found = judged(tmp_path, LISTENER, leaves=True)
    assert [line for line in found if line.startswith("port ") and line.endswith(" is still open (API)")], found


def test_a_file_left_in_shared_memory_is_a_fault(tmp_path):
    assert judged(tmp_path, "Path('shm', 'weights').touch()") == [f"{tmp_path}/shm/weights is left"]


@pytest.mark.parametrize(
    ("result", "fault"),
    [
        ({"losses": [4.0, 3.0, 2.0]}, "the loss did not fall below half of the first: 4.00 at first, 2.00 at last"),
        ({"losses": []}, "0 losses for 3 steps"),
        ({"answers_before": ["A", HABIT, "C"]}, "the habit shows before the training, in 1 of 3 answers"),
        ({"answers_after": ["A", f"B {HABIT}", "C"]}, "the habit shows in 1 of 3 answers after the training"),
        ({"answers_after": [HABIT]}, "3 answers before and 1 after, to 3 prompts"),
    ],
)
def test_results_that_show_no_learning_are_a_fault(tmp_path, result, fault):
    assert judged(tmp_path, result=result) == [fault]


def test_what_the_install_says_before_the_demo_is_not_judged():
    output = f"WARNING: pip says so\n.venv/bin/tinsmith demo\n{'█' * 24}\nReady\n"
    assert noise(output) == []
    assert noise(output.replace("Ready", "UserWarning: x")) == ["UserWarning: x"]


def test_the_command_is_the_first_one_of_the_readme_that_runs_the_project():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    commands = [line.strip() for line in readme.split("## Try it")[1].splitlines() if line.startswith("    ")]
    assert next(line for line in commands if not line.startswith("sudo ")).startswith(" ".join(COMMAND))
