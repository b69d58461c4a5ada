"""Each mutant dies: the tests named for it pass without it and fail with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.mutants.mutants import MUTANTS, Mutant

_ROOT = Path(__file__).parents[2]
_COPIED = ("app", "workers", "tests", "pyproject.toml")
_CHOSEN = [mutant for mutant in MUTANTS if not mutant.slow or "TINSMITH_SLOW_MUTANTS" in os.environ]
_PASSED, _FAILED = 0, 1


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the project, for one mutant after the other."""
    return _copy(tmp_path_factory.mktemp("copy"))


@pytest.mark.parametrize("mutant", _CHOSEN, ids=lambda mutant: mutant.name)
def test_a_guard_that_is_taken_out_is_missed(copy: Path, mutant: Mutant):
    file = copy / mutant.file
    text = file.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} must hold this once:\n{mutant.old}"
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        status, output = _run(copy, mutant.tests)
    finally:
        file.write_text(text)
    assert status == _FAILED, f"pytest ended with {status}:\n{output}"


def test_the_copies_pass_where_no_guard_is_taken_out(tmp_path: Path):
    """Else a copy in which no test can run would look as if all mutants died."""
    copy = _copy(tmp_path)
    by_options: defaultdict[str, list[str]] = defaultdict(list)
    for tests in sorted({mutant.tests for mutant in MUTANTS}):
        options, _, test = tests.rpartition(" ")
        by_options[options].append(test)
    for options, named in by_options.items():
        status, output = _run(copy, f"{options} {' '.join(named)}")
        assert status == _PASSED, output


def _copy(folder: Path) -> Path:
    for name in _COPIED:
        source = _ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def _run(copy: Path, tests: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()],
        cwd=copy,
        env={**os.environ, "PYTEST_ADDOPTS": "", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout[-4000:] + done.stderr[-1000:]
