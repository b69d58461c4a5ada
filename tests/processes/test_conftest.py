"""The rules of tests/conftest.py, each tested in a separate pytest run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from app.stack import hardware
from tests import conftest

TEST = "import pytest\n{mark}\ndef test_it():\n    {body}\n"


def run(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(conftest.__file__, folder / "conftest.py")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (folder / "test_it.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(folder)],
        capture_output=True,
        text=True,
        # Imports of other plugins take 1.4 of the 1.9 CPU seconds of a run.
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )


@pytest.mark.parametrize(
    "text",
    [
        TEST.format(mark="", body="pytest.skip('not today')"),
        TEST.format(mark="@pytest.mark.skip(reason='not today')", body="pass"),
        "import pytest\npytest.skip('not today', allow_module_level=True)\n",
    ],
)
def test_a_skipped_test_fails_the_run_with_its_reason(tmp_path, text):
    result = run(tmp_path, text)
    assert result.returncode != 0
    assert "was skipped" in result.stdout and "not today" in result.stdout


@pytest.mark.parametrize(
    "text",
    [
        TEST.format(mark="@pytest.mark.gpu", body="pytest.skip('no GPU here')"),
        TEST.format(mark="@pytest.mark.xfail", body="assert False"),
        TEST.format(mark="", body="pass"),
    ],
)
def test_gpu_tests_expected_failures_and_passes_do_not(tmp_path, text):
    assert run(tmp_path, text).returncode == 0


@pytest.mark.parametrize(
    ("device", "torch", "reason"),
    [
        ("nvidia0", "2.13.0", ""),
        ("nvidia0", "2.13.0+cpu", "torch is a CPU build"),
        ("nvidiactl", "2.13.0", "no GPU on this machine"),
    ],
)
def test_gpu_tests_run_where_there_is_a_gpu_and_no_cpu_build_of_torch(tmp_path, monkeypatch, device, torch, reason):
    (tmp_path / device).touch()
    monkeypatch.setattr(hardware, "version", {"torch": torch}.__getitem__)
    assert conftest.lacks_gpu(tmp_path) == reason


def test_a_test_bears_the_marker_of_its_tier(request):
    assert [mark.name for mark in request.node.iter_markers()] == ["processes"]


# Until the failure is reported each collection finalizes one and makes another. The finalizer fails, so a traceback is
# formatted in the middle of what the collection interrupts.
FINALIZERS = """
import gc, sys, traceback

class Garbage:
    more = True

    def __init__(self):
        self.itself = self

    def __del__(self):
        if Garbage.more:
            Garbage()
            raise ValueError("of a" + " finalizer")

def hook(unraisable):
    traceback.format_exception(unraisable.exc_type, unraisable.exc_value, unraisable.exc_traceback)

def test_it():
    gc.set_threshold(20)
    sys.unraisablehook = hook
    Garbage()
    assert 6 * 9 == 42

def teardown_function():
    Garbage.more = False
"""
UNFORMATTED = """
import pytest

def refuse(*args, **options):
    raise SystemError("not formatted")

def test_it():
    pytest.ExceptionInfo.getrepr = refuse
    assert 6 * 9 == 42

def test_another():
    assert 7 * 6 == 42
"""


@pytest.mark.parametrize(("text", "passed"), [(FINALIZERS, 0), (UNFORMATTED, 1)], ids=["finalizers", "refused"])
@pytest.mark.parametrize("processes", [[], ["-p", "xdist.plugin", "-n", "1"]], ids=["alone", "xdist"])
def test_a_failure_is_reported_by_name_whatever_formatting_it_raises(tmp_path, text, passed, processes):
    result = run(tmp_path, text, *processes)
    assert result.returncode == 1, "tests failed; 3 is an internal error"
    assert re.search(r"^FAILED .*test_it\.py::test_it\b", result.stdout, re.MULTILINE)
    assert "6 * 9" in result.stdout
    assert ("1 failed, 1 passed" if passed else "1 failed") in result.stdout
