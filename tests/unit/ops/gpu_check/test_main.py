"""The whole check of a tiny model on a CPU, and the goals of what a GPU would give."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ops.gpu_check import __main__ as check
from ops.gpu_check import shapes, suites, training
from ops.gpu_check.__main__ import _lines, _parse, _parts, _served, goals
from ops.gpu_check.device import datasheet

DEADLINE_S = 600


def test_a_check_writes_the_steps_of_every_batch_on_both_sides_and_serves_the_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ops.gpu_check", "--suites", "handover", "--sizes", "tiny", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    report = json.loads((tmp_path / "gpu.json").read_text())
    figures = report["figures"]
    assert figures["device"]["product_flops"] > 0 and report["versions"]["torch"]
    own, bare = figures["tiny"][training.TINSMITH], figures["tiny"][training.PEFT]
    assert [*own] == [*training.lengths("tiny")] and [*bare] == [*own][:3]
    assert all(min(row["step_s"]) > 0 for row in (*own.values(), *bare.values()))
    assert report["met"] == (done.returncode == 0), done.stderr[-3000:]
    assert figures["handover"]["added_ms"]["count"] == figures["handover"]["rounds"] > 0
    assert len(report["goals"]) == len(bare) + 2


def test_the_check_itself_needs_no_package_of_a_stack() -> None:
    needed = "import sys, ops.gpu_check.__main__; print(*{'tinker', 'celery', 'flask', 'deepspeed'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", needed], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert done.stdout.strip() == ""


def steps(seconds: dict[str, float]) -> dict[str, Any]:
    return {batch: {"step_s": [2 * best, best]} for batch, best in seconds.items()}


def test_goals_compare_the_best_steps() -> None:
    figures = {
        "device": {"datasheet_flops": 1e15},
        "parity": {"ok": False},
        "zero": {"left out": "needs deepspeed"},
        "handover": {"goals": [{"figure": "p50", "value": 3.0, "sense": "at_most", "limit": 5.0, "unit": "ms"}]},
        "sampling": {"left out": "needs vllm"},
        "8B": {
            "tinsmith": steps({"8k": 2.0, "2k, uneven": 0.9, "2k, uneven, 16 tenants": 1.0}),
            "peft": steps({"8k": 5.0}),
        },
    }
    found = {goal.figure: goal.value for goal in goals(figures)}
    flops = shapes.step_flops(shapes.config("8B"), [8192] * 4)
    assert found == {
        "tests of parity that passed": 0.0,
        "p50": 3.0,
        "8B, 8k: over transformers + PEFT": 2.5,
        "8B: 16 uneven tenants over one": 0.9,
        "8B, 8k: MFU": pytest.approx(flops / 2.0 / 1e15),
    }


def test_suites_that_may_take_all_of_the_time_come_last(tmp_path: Path) -> None:
    names = [name for name, _ in _parts(_parse([]), tmp_path)]
    first, served = ["gpu", "parity", "optimizer"], ["handover", "sampling"]
    sizes = ["8B", "8B", "0.6B", "0.6B", "4B", "4B"]  # the two sides of each
    assert names == [*first, *sizes, *served, "architectures", "zero", "ranks", "vllm", "vllm-ranks", "sleep", "chaos"]


def test_a_stack_without_its_packages_is_left_out_by_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(suites.SERVED, "sampling", ["pytest", "no_such_package"])
    assert _served("sampling", "tiny", tmp_path, DEADLINE_S) == {"left out": "needs no_such_package"}


@pytest.fixture
def cut_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, float]:
    """A check that ends in its second side. Returns the seconds that each side was given."""
    given: dict[str, float] = {}

    def noted(module: str, *arguments: str, seconds: float) -> list[dict[str, Any]]:
        if module == "device":
            return [{"name": "NVIDIA H200", **datasheet("NVIDIA H200")}]
        given[arguments[2]] = seconds
        if len(given) == 2:
            raise KeyboardInterrupt
        return [{"batch": "8k", "step_s": [2.0]}]

    monkeypatch.setattr(check, "_lines", noted)
    with pytest.raises(KeyboardInterrupt):
        check.main(["--suites", "--sizes", "8B", "--minutes", "600", "--out", str(tmp_path)])
    return given


def test_one_side_leaves_time_to_the_other(cut_off: dict[str, float]) -> None:
    assert cut_off[training.TINSMITH] <= 300 * 60 < cut_off[training.PEFT]


def test_a_check_that_is_cut_off_leaves_the_figures_of_the_first_side(
    cut_off: dict[str, float], tmp_path: Path
) -> None:
    figures = json.loads((tmp_path / "gpu.json").read_text())["figures"]
    assert figures["8B"] == {training.TINSMITH: {"8k": {"step_s": [2.0]}}}


def test_a_side_that_crashes_keeps_its_batches_and_says_how_it_ended(tmp_path: Path) -> None:
    [line] = _lines("training", "tiny", str(tmp_path / "base"), "no such side", seconds=DEADLINE_S)
    assert line == {"batch": "the rest", "failed": "exit code 1"}
    assert _lines("device", seconds=0.01) == [{"batch": "the rest", "failed": "unfinished after 0 s"}]


def test_a_batch_that_failed_and_a_device_without_a_datasheet_have_no_goal() -> None:
    sides = {"tinsmith": {"8k": {"failed": "out of memory"}}, "peft": steps({"8k": 5.0})}
    assert list(goals({"device": {"datasheet_flops": None}, "8B": sides})) == []


@pytest.mark.parametrize(
    ("name", "said"), [("NVIDIA H100 NVL", ""), ("NVIDIA X9", "MFU: unknown: _PEAKS in ops/gpu_check/device.py has no")]
)
def test_the_mfu_of_a_gpu_that_is_not_listed_is_unknown_with_the_reason(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"name": name, **datasheet(name)}
    assert ("mfu" in facts) == (facts["datasheet_flops"] is None) == bool(said)
    monkeypatch.setattr(check, "_lines", lambda *_, seconds: [facts])
    assert check.main(["--suites", "--sizes", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert said in printed and ("MFU" in printed) == bool(said)
