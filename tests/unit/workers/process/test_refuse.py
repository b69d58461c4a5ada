"""A worker whose base model cannot be served ends with 3 and one line; any other setup error ends it with 2."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from app import errors
from workers.process.startup import refuse

try:
    raise getattr(errors, sys.argv[1])("no linear\\nfits") from ValueError("the cause")
except errors.SetupError as error:
    refuse("trainer", error)
"""


@pytest.mark.parametrize(("error", "code", "traced"), [("UnservableModel", 3, False), ("SetupError", 2, True)])
def test_the_kind_of_setup_error_chooses_the_exit_code_and_the_traceback(error: str, code: int, traced: bool):
    ended = subprocess.run([sys.executable, "-c", PROGRAM, error], capture_output=True, text=True)
    assert ended.returncode == code
    assert ended.stderr.splitlines()[-1] == "trainer: no linear fits"
    assert ("the cause" in ended.stderr) is traced
