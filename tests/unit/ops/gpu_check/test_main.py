"""The parts of a check, and the goals of what a GPU would give."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ops.bench.report import Outcome
from ops.gpu_check import __main__ as check
from ops.gpu_check import shapes, suites, training
from ops.gpu_check.__main__ import _lines, _needs_logs, _parse, _parts, _refusal, _served, goals
from ops.gpu_check.device import datasheet
from tests.unit.ops.compose import ROOT

DEADLINE_S = 600


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


def test_vllm_comes_after_the_first_size_and_suites_that_may_take_all_of_the_time_come_last(tmp_path: Path) -> None:
    names = [name for name, _ in _parts(_parse([]), tmp_path, tmp_path)]
    first, served = ["gpu", "8B", "8B"], ["vllm", "sleep", "handover", "sampling"]  # a size has two sides
    others = ["parity", "optimizer", "0.6B", "0.6B", "4B", "4B"]
    assert names == [*first, *served, *others, "architectures", "zero", "ranks", "vllm-ranks", "chaos"]
    chosen = ["--suites", "sampling", "gpu", "--sizes"]
    assert [name for name, _ in _parts(_parse(chosen), tmp_path, tmp_path)] == ["gpu", "sampling"]


def test_a_stack_without_its_packages_is_left_out_by_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(suites.SERVED, "sampling", ["pytest", "no_such_package"])
    assert _served("sampling", "tiny", tmp_path, tmp_path, DEADLINE_S) == {"left out": "needs no_such_package"}


def test_a_stack_that_fails_misses_a_goal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(suites.SERVED, "handover", [])
    found = _served("handover", "no such size", tmp_path / "model", tmp_path, DEADLINE_S)
    assert found == {"failed": "exit code 1"}
    [goal] = goals({"device": {}, "handover": found})
    assert (goal.figure, goal.met) == ("handover ran to its end", False)


def test_a_stack_that_is_cut_off_misses_no_goal_and_leaves_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(suites.SERVED, "handover", [])
    (tmp_path / "model").mkdir()
    found = _served("handover", "tiny", tmp_path / "model", tmp_path, 0.01)
    assert found == {"ended": "after 0 s, unfinished"} and not (tmp_path / "model").exists()
    assert list(goals({"device": {}, "handover": found})) == []


def test_a_device_and_a_side_that_crash_miss_a_goal_and_a_side_that_is_cut_off_does_not() -> None:
    crashed, cut = {"failed": "exit code 1"}, {"ended": "after 5 s, unfinished"}
    sides = {training.TINSMITH: {"the rest": crashed}, training.PEFT: {"the rest": cut}}
    found = list(goals({"device": crashed, "8B": sides}))
    assert [goal.figure for goal in found] == ["device ran to its end", "8B, tinsmith ran to its end"]
    assert not any(goal.met for goal in found)


@dataclass(frozen=True, slots=True)
class Served:
    """A check of one stack that ends as `line` says: its exit code, its output, and the folders that it was given."""

    code: int
    out: Path
    model: Path
    folder: Path


@pytest.fixture
def served(line: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    given: list[Path] = []

    def logged(module: str, *arguments: str, seconds: float) -> list[dict[str, Any]]:
        if module == "serving":
            given.extend(map(Path, arguments[-2:]))
            for log in ("up.log", "data/logs/trainer-0.log"):
                (given[1] / log).parent.mkdir(parents=True, exist_ok=True)
                (given[1] / log).write_text(log)
        return [line if module == "serving" else {}]

    monkeypatch.setattr(check, "_lines", logged)
    monkeypatch.setattr(check.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(check, "_IN_MEMORY", tmp_path / "memory")
    monkeypatch.setattr(check, "_ROOM_BYTES", 0)
    monkeypatch.setitem(suites.SERVED, "handover", [])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "memory").mkdir()
    code = check.main(["--suites", "handover", "--sizes", "--minutes", "600", "--out", str(tmp_path / "out")])
    return Served(code, tmp_path / "out", *given)


@pytest.mark.parametrize("line", [{"rounds": 12, "goals": []}])
def test_a_model_lies_in_memory_and_the_data_of_its_stack_on_the_disk(served: Served, tmp_path: Path) -> None:
    assert served.model.is_relative_to(tmp_path / "memory")
    assert served.folder.is_relative_to(tmp_path / "data" / "bench") and not served.folder.exists()
    assert (served.code, [path.name for path in served.out.iterdir()]) == (0, ["gpu.json"])


@pytest.mark.parametrize(
    ("line", "code"),
    [({"batch": "the rest", "failed": "exit code 1"}, 1), ({"batch": "the rest", "ended": "after 5 s, unfinished"}, 0)],
)
def test_a_stack_that_fails_or_is_cut_off_leaves_its_logs(served: Served, code: int) -> None:
    logs = {path.name: path.read_text() for path in (served.out / "logs" / "handover").iterdir()}
    assert logs == {"up.log": "up.log", "trainer-0.log": "data/logs/trainer-0.log"} and served.code == code


@pytest.mark.parametrize(
    ("found", "needed"),
    [
        ({"ok": True, "tests": 2, "failed": 0}, False),
        ({"ok": False, "tests": 2, "failed": 1}, True),
        ({"ok": False, "tests": 0, "failed": 0}, True),
        ({"ended": "after 5 s, unfinished"}, True),
        ({"left out": "needs vllm"}, False),
    ],
)
def test_logs_are_kept_of_a_suite_that_failed_or_did_not_end(found: dict[str, Any], needed: bool) -> None:
    assert _needs_logs(found) == needed


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
    monkeypatch.setattr(check.torch.cuda, "is_available", lambda: True)
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
    assert _lines("device", seconds=0.01) == [{"batch": "the rest", "ended": "after 0 s, unfinished"}]


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


@pytest.mark.parametrize("arguments", [[], ["--sizes", "tiny", "8B"], ["--suites", "handover", "--sizes"]])
def test_without_a_gpu_it_is_refused_and_writes_no_report(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check.torch.cuda, "is_available", lambda: False)
    assert check.main([*arguments, "--out", str(tmp_path)]) == 2
    assert "no GPU that torch can use" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_beside_a_driver_that_torch_cannot_use_it_is_refused_with_torchs_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML, which `device_count` asks, counts such a driver's GPUs."""

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).")

    (tmp_path / "0000:00:00.0").mkdir()
    monkeypatch.setattr(check.check_gpus, "__defaults__", (tmp_path,))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "driver on your system is too old (found version 12040). Update" in _refusal(_parse([]))


_VLLM = {"vllm", "vllm-ranks", "sleep", "sampling"}
_TURING = {"name": "T4", "memory_gib": 14.6, "bfloat16": False}
_ADA_16 = {"name": "RTX 4080", "memory_gib": 15.6, "bfloat16": True}
_ADA_24 = {"name": "RTX 4090", "memory_gib": 23.5, "bfloat16": True}


@pytest.mark.parametrize(
    ("device", "sizes", "left_out"),
    [
        (_TURING, ["8B", "0.6B", "4B"], {"8B", *_VLLM}),
        (_ADA_16, ["8B", "0.6B", "4B"], {"8B"}),
        (_ADA_24, ["8B", "0.6B", "4B"], set()),
        (_ADA_24, ["8B", "4B"], {"handover", "sampling"}),
        ({"name": "cpu"}, ["tiny"], set()),
    ],
    ids=["Turing", "16 GB", "24 GB", "24 GB, shared by a stack", "CPU"],
)
def test_parts_that_a_gpu_is_too_old_or_too_small_for_are_left_out_with_the_reason_and_miss_no_goal(
    device: dict[str, Any], sizes: list[str], left_out: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ran(module: str, *arguments: str, seconds: float) -> list[dict[str, Any]]:
        if module == "device":
            return [{"datasheet_flops": None, **device}]
        return [{"batch": "8k", "step_s": [9.0 if training.PEFT in arguments else 1.0], "goals": []}]

    monkeypatch.setattr(check, "_lines", ran)
    monkeypatch.setattr(suites, "run", lambda suite, folder, seconds: {"ok": True})
    monkeypatch.setattr(suites, "missing", lambda needs: {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.chdir(tmp_path)
    assert check.main(["--minutes", "600", "--out", str(tmp_path), "--sizes", *sizes]) == 0
    figures = json.loads((tmp_path / "gpu.json").read_text())["figures"]
    reasons = {name: found["left out"] for name, found in figures.items() if "left out" in found}
    assert reasons.keys() == left_out
    too_old = _VLLM if device is _TURING else {}
    assert all(("bfloat16" if name in too_old else "GiB of weights") in reason for name, reason in reasons.items())


def test_a_report_lies_in_a_folder_that_git_ignores() -> None:
    assert f"/{_parse([]).out.parts[0]}/" in (ROOT / ".gitignore").read_text().splitlines()


def test_a_check_that_came_to_no_goal_is_not_met() -> None:
    assert not Outcome({}, ()).met
