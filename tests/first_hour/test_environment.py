"""The check of `pip check`, with a stand-in for an environment's Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.first_hour.environment import _WRONG_TAG, Environment, InstallError, _check


def environment(folder: Path, script: str) -> Environment:
    made = Environment(folder)
    python = Path(made.python)
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return made


@pytest.mark.parametrize("script", ["echo No broken requirements found.", f"echo '{_WRONG_TAG}'; exit 1"])
def test_an_environment_that_is_whole_passes(tmp_path: Path, script: str):
    _check(environment(tmp_path, script))


@pytest.mark.parametrize(
    "script",
    [
        "echo a requires b; exit 1",
        f"echo '{_WRONG_TAG}'; echo a requires b; exit 1",
        "echo a requires b >&2; exit 2",
    ],
    ids=["broken", "broken beside the wrong tag", "pip itself failed"],
)
def test_what_is_broken_is_said(tmp_path: Path, script: str):
    with pytest.raises(InstallError, match="a requires b"):
        _check(environment(tmp_path, script))
