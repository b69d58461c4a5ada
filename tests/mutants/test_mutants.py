"""Each mutant dies: the tests named for it pass on the real code and fail on the mutant."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants.guards import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.warm import Warm, warm

_ROOT = Path(__file__).parents[2]
_COPIED = ("app", "workers", "ops", "tests", "pyproject.toml")
_ALL = "TINSMITH_ALL_MUTANTS" in os.environ
# All of them take eight minutes of a core: `make test` takes the first one of each folder of tests.
_FIRST = {mutant.folder: mutant for mutant in reversed(MUTANTS) if not mutant.slow}
_CHOSEN = MUTANTS if _ALL else tuple(_FIRST.values())
_PASSED, _FAILED = 0, 1


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, for one mutant after the other."""
    return _copy(tmp_path_factory.mktemp("copy"))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    with warm(tmp_path_factory.mktemp("warm") / "output") as process:
        yield process


def test_each_guard_is_in_its_file_exactly_once():
    """A quick check; the tests below need minutes for all guards."""
    counts = {mutant.name: (_ROOT / mutant.file).read_text().count(mutant.old) for mutant in MUTANTS}
    wrong = {name: count for name, count in counts.items() if count != 1}
    assert not wrong, "change the mutant's `old` in tests/mutants/guards/, so that its file has that text exactly once"


def test_each_test_that_a_mutant_names_exists():
    """A quick check as well: a test that was renamed fails the tests below only after minutes."""
    missing = []
    for mutant in MUTANTS:
        file, *names = mutant.tests.split()[-1].partition("[")[0].split("::")
        text = (_ROOT / file).read_text()
        missing += [f"{mutant.name}: {file}::{name}" for name in names if f" {name}(" not in text]
    assert not missing


@pytest.mark.parametrize("mutant", _CHOSEN, ids=lambda mutant: mutant.name)
def test_a_guard_that_is_taken_out_is_missed(python: Warm, copy: Path, mutant: Mutant):
    file = copy / mutant.file
    text = file.read_text()
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        status, output = _run(python, copy, mutant.tests)
    finally:
        file.write_text(text)
    assert status == _FAILED, f"pytest ended with {status}:\n{output}"


def test_the_copy_passes_where_no_guard_is_taken_out(python: Warm, copy: Path):
    """Otherwise a copy in which no test can run would look as if all mutants died.

    `make mutants` runs every test that a mutant names, and `make test` one of each conftest.py: all pass in the tree.
    """
    by_options: defaultdict[str, list[str]] = defaultdict(list)
    seen: set[Path | None] = set()
    for tests in sorted({mutant.tests for mutant in _CHOSEN}):
        options, _, test = tests.rpartition(" ")
        conftest = _nearest_conftest(options, test.partition("::")[0])
        if _ALL or conftest not in seen:
            by_options[options].append(test)
        seen.add(conftest)
    for options, named in by_options.items():
        status, output = _run(python, copy, f"{options} {' '.join(named)}")
        assert status == _PASSED, output


def _nearest_conftest(options: str, file: str) -> Path | None:
    """The nearest one that pytest loads. Tests that share it need the same of a copy."""
    highest = _ROOT / options.partition("--confcutdir=")[2].partition(" ")[0]
    found = (folder / "conftest.py" for folder in (_ROOT / file).parents if folder.is_relative_to(highest))
    return next((path for path in found if path.exists()), None)


def _copy(folder: Path) -> Path:
    """Copies compiled files too, which stay valid as long as a source file keeps its time: no run writes any."""
    for name in _COPIED:
        source = _ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*.pyc.*"))
        else:
            shutil.copy(source, folder / name)
    return folder


def _run(python: Warm, copy: Path, tests: str) -> tuple[int, str]:
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={copy / 'temporary'}"]
    status, output = python.run(copy, [*options, *tests.split()])
    return status, output[-5000:]
