"""The code of another commit, with the packages of this environment."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.contract.stack import code_of

FROM = os.environ.get("TINSMITH_UPGRADE_FROM", "")
"""The commit to upgrade from, where there is its history; the tests that need it are collected only then."""

_ROOT = Path(__file__).resolve().parents[2]
_TREES = _ROOT / "build" / "upgrade"


def exported(commit: str) -> Path:
    """A folder with the commit's files; it is kept, because a commit never changes."""
    name = _git("rev-parse", "--verify", f"{commit}^{{commit}}").decode().strip()
    tree = _TREES / name
    if not tree.is_dir():
        partial = _TREES / f"{name}.{os.getpid()}"
        with tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", name))) as files:
            files.extractall(partial)
        partial.rename(tree)
    _check(tree)
    return tree


def _check(tree: Path) -> None:
    """Checks that the commit's code runs, and not our own, which is also installed in this environment."""
    program = "import app, workers; print(app.__file__, workers.__file__)"
    environment = {**os.environ, **code_of(tree)}
    found = subprocess.check_output([sys.executable, "-c", program], cwd=tree, env=environment, text=True).split()
    expected = [str(tree / package / "__init__.py") for package in ("app", "workers")]
    if found != expected:
        raise RuntimeError(f"{found} would run, not {expected}")


def _git(*arguments: str) -> bytes:
    return subprocess.check_output(["git", "-C", str(_ROOT), *arguments])
