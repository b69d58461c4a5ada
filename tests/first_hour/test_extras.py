"""The order and the report of the extras, with a stand-in for the program that tries one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.first_hour import extras

# It waits for another one, but not for ever. `train` fails.
_STAND_IN = """#!/bin/sh
echo "$3 begins"
touch "begun-$3"
for _ in $(seq 500); do
  [ "$(ls begun-* | wc -l)" -lt 2 ] || break
  sleep 0.01
done
[ "$(ls begun-* | wc -l)" -ge 2 ] && echo "$3 ends beside another"
[ "$3" != train ]
"""


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "tinsmith.whl").touch()
    program = tmp_path / "python"
    program.write_text(_STAND_IN)
    program.chmod(0o755)
    monkeypatch.setattr(extras, "ROOT", tmp_path)
    monkeypatch.setattr(extras.sys, "executable", str(program))


def test_extras_are_tried_beside_each_other_and_the_output_of_each_is_in_one_piece(
    alone: None, capfd: pytest.CaptureFixture[str]
):
    assert extras.main(["flower", "demo"]) == 0
    shown = capfd.readouterr().out.splitlines()
    assert sorted([shown[:2], shown[2:]]) == [
        ["demo begins", "demo ends beside another"],
        ["flower begins", "flower ends beside another"],
    ]


def test_an_extra_that_fails_is_named_and_the_others_are_tried(alone: None, capfd: pytest.CaptureFixture[str]):
    assert extras.main(["train", "flower", "demo"]) == 1
    shown = capfd.readouterr().out.splitlines()
    assert {"train begins", "flower begins", "demo begins"} < set(shown)
    assert shown[-1] == "failed: train"


def test_an_unknown_extra_is_refused_before_any_is_tried(alone: None, capfd: pytest.CaptureFixture[str]):
    assert extras.main(["flower", "demmo"]) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "there is no extra demmo" in shown.err
