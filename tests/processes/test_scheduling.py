"""The rules of tests/scheduling.py, tested in a separate pytest run of two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPTIONS = "-q -n 2 --dist loadscope --no-loadscope-reorder -p xdist.plugin -p no:cacheprovider"
CONFTEST = """
import os
import time
from pathlib import Path

from tests.scheduling import Scheduling

FOLDER = Path(__file__).parent

def until(pattern, count):
    while len([*FOLDER.glob(pattern)]) < count:
        time.sleep(0.01)

def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log)

def pytest_runtest_teardown(item):
    FOLDER.joinpath(f"{item.path.stem}.{item.name}.ran").touch()
"""
TWO_PASS = "def test_one(): pass\ndef test_two(): pass\n"
ONE_DIES = """
import os
from pathlib import Path

from conftest import until

DIED = Path(__file__).with_suffix(".died")

def test_one(): pass

def test_of_death():
    if not DIED.exists():
        DIED.touch()
        until(*{last})
        os._exit(1)

def test_two(): pass
"""
# When the first of two replacements has collected, the second is ready and has not: it waits for a test of the first.
COLLECT_ONE_AFTER_THE_OTHER = """
def pytest_collection_modifyitems():
    FOLDER.joinpath(os.environ["PYTEST_XDIST_WORKER"] + ".collects").touch()
    if os.environ["PYTEST_XDIST_WORKER"] == "gw2":
        until("gw3.collects", 1)
    if os.environ["PYTEST_XDIST_WORKER"] == "gw3":
        until("gw2.runs", 1)

def pytest_runtest_setup():
    FOLDER.joinpath(os.environ["PYTEST_XDIST_WORKER"] + ".runs").touch()
"""


def run(folder: Path) -> str:
    """Runs the tests of the folder in two processes; returns the output."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS.split(), str(folder)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
    ).stdout


def test_a_run_ends_and_names_the_test_in_which_a_process_died(tmp_path: Path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for number in range(9):
        # Of the 16 tests in other files, this process may have those of one file still before it.
        dies = ONE_DIES.format(last=("*.ran", 15))
        (tmp_path / f"test_{number}.py").write_text(dies if number == 4 else TWO_PASS)
    output = run(tmp_path)
    assert "crashed while running 'test_4.py::test_of_death'" in output
    assert "1 failed, 19 passed" in output


def test_a_run_ends_and_names_the_tests_in_which_two_processes_died_at_once(tmp_path: Path):
    (tmp_path / "conftest.py").write_text(CONFTEST + COLLECT_ONE_AFTER_THE_OTHER)
    for number in range(9):
        # The processes begin with the first file and with the last.
        dies = ONE_DIES.format(last=("*.died", 2))
        (tmp_path / f"test_{number}.py").write_text(dies if number in (0, 8) else TWO_PASS)
    output = run(tmp_path)
    assert "crashed while running 'test_0.py::test_of_death'" in output
    assert "crashed while running 'test_8.py::test_of_death'" in output
    assert "2 failed, 20 passed" in output
