"""The rules of tests/scheduling.py, tested in a separate pytest run of two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPTIONS = "-q -n 2 --dist loadscope --no-loadscope-reorder -p xdist.plugin -p no:cacheprovider"
CONFTEST = """
from pathlib import Path

from tests.scheduling import Scheduling

def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log)

def pytest_runtest_teardown(item):
    Path(__file__).with_name(f"{item.path.stem}.{item.name}.ran").touch()
"""
TWO_PASS = "def test_one(): pass\ndef test_two(): pass\n"
ONE_DIES = """
import os
import time
from pathlib import Path

DIED = Path(__file__).with_name("died")

def test_one(): pass

def test_of_death():
    if not DIED.exists():
        DIED.touch()
        # Of the 16 tests in other files, this process may have those of one file still before it.
        while len([*DIED.parent.glob("*.ran")]) < 15:
            time.sleep(0.01)
        os._exit(1)

def test_two(): pass
"""


def test_a_run_ends_and_names_the_test_in_which_a_process_died(tmp_path: Path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for number in range(9):
        (tmp_path / f"test_{number}.py").write_text(ONE_DIES if number == 4 else TWO_PASS)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS.split(), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
    )
    assert "crashed while running 'test_4.py::test_of_death'" in result.stdout
    assert "1 failed, 19 passed" in result.stdout
