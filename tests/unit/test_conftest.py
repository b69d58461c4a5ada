"""The rule of tests/conftest.py, tried in a pytest run of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest

TEST = "import pytest\n{mark}\ndef test_it():\n    {body}\n"


def run(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(conftest.__file__, folder / "conftest.py")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (folder / "test_it.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)], capture_output=True, text=True
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
