"""The report of a suite of tests says how it ended, whatever it did."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ops.gpu_check import suites
from ops.gpu_check.__main__ import goals
from ops.gpu_check.suites import SUITES, Suite, run
from tests.conformance.samplers import CONTEXT, PROMPTS, make_reference, settings_of
from tests.models import tiny_qwen3
from workers.backends.sampling.vllm.arguments import engine_args
from workers.backends.sampling.vllm.checks import check_dtype
from workers.models import base_model

ROOT = Path(__file__).parents[4]
DEADLINE_S = 600


def suite(tmp_path: Path, *tests: str) -> Suite:
    file = tmp_path / "test_one.py"
    file.write_text("\n".join(("import os, time", *tests)))
    return Suite([str(file)], ["pytest"])


def test_a_suite_that_passes_has_the_number_of_its_tests(tmp_path: Path) -> None:
    found = run(suite(tmp_path, "def test_a(): ...", "def test_b(): ..."), tmp_path, DEADLINE_S)
    assert found == {"ok": True, "tests": 2, "skipped": 0, "failed": 0, "first failed": []}


def test_a_failed_test_has_its_name_and_reason(tmp_path: Path) -> None:
    found = run(suite(tmp_path, "def test_a(): assert 1 == 2", "def test_b(): ..."), tmp_path, DEADLINE_S)
    [name] = found.pop("first failed")
    assert found == {"ok": False, "tests": 2, "skipped": 0, "failed": 1}
    assert "test_a" in name and "1 == 2" in name


def test_a_suite_that_ends_its_process_is_not_ok_and_has_the_end_of_its_log(tmp_path: Path) -> None:
    died = run(suite(tmp_path, "os._exit(9)"), tmp_path, DEADLINE_S)
    assert (died["ok"], died["ended"]) == (False, "with exit code 9 and no report")
    assert died.keys() == {"ok", "ended", "log"}


def test_a_suite_that_is_cut_off_says_so_and_has_not_failed(tmp_path: Path) -> None:
    hung = run(suite(tmp_path, "time.sleep(3600)"), tmp_path / "hung", 5)
    assert hung["ended"] == "after 5 s, unfinished" and hung.keys() == {"ended", "log"}
    assert list(goals({"device": {}, "zero": hung})) == []


def test_a_suite_without_its_packages_is_left_out_by_their_name(tmp_path: Path) -> None:
    assert run(Suite([str(tmp_path)], ["pytest", "no_such_package"]), tmp_path, DEADLINE_S) == {
        "left out": "needs no_such_package"
    }


def test_a_test_that_is_skipped_has_its_reason_in_the_report(tmp_path: Path) -> None:
    test = 'def test_a(): pytest.importorskip("no_such_package", reason="needs no_such_package")'
    found = run(suite(tmp_path, "import pytest", test, "def test_b(): ..."), tmp_path, DEADLINE_S)
    assert (found["ok"], found["skipped"], found["skipped because"]) == (True, 1, ["needs no_such_package"])


def test_the_suite_of_kernels_needs_no_package_of_the_other_parts() -> None:
    """It is the one that runs on a machine where nothing can be installed."""
    others = {"liger_kernel", *suites.SERVED["sampling"]}.union(*(one.needs for one in SUITES.values()))
    without = f"import sys, pytest; sys.modules |= dict.fromkeys({sorted(others - {*SUITES['gpu'].needs})})"
    command = f"{without}; sys.exit(pytest.main({['--collect-only', '-q', *SUITES['gpu'].tests]}))"
    plain = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # the plugins of other packages
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, env={**os.environ, **plain}, capture_output=True, text=True
    )
    assert done.returncode == 0 and "test_gpus.py" in done.stdout, done.stdout[-2000:]


def test_only_the_suite_that_needs_deepspeed_has_the_tests_that_run_it() -> None:
    parity, zero = (_of_memory(SUITES[name]) for name in ("parity", "zero"))
    assert parity and not [one for one in parity if "zero-3" in one]
    assert zero and all("zero-3" in one for one in zero)
    assert "deepspeed" in SUITES["zero"].needs and "deepspeed" not in SUITES["parity"].needs


def _of_memory(suite: Suite) -> list[str]:
    """The names of the suite's tests in test_memory.py, some of which run DeepSpeed."""
    file = "tests/parity/test_memory.py"
    assert file in suite.tests
    chosen = [one for one in suite.tests if one == file or not one.startswith("tests/")]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *chosen]
    plain = {**os.environ, "PYTEST_ADDOPTS": ""}  # options of the user may change what is printed
    found = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if line.startswith(file)]


def test_a_suite_for_more_gpus_than_there_are_is_left_out_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for gpus in (2, 3):
        found = run(Suite(suite(tmp_path, "def test_a(): ...").tests, ["pytest"], gpus), tmp_path, DEADLINE_S)
        assert found.get("left out") == (None if gpus == 2 else "needs 3 GPUs, and torch sees 2")
        assert found.get("ok") == (True if gpus == 2 else None)


def test_the_tests_of_every_suite_are_there() -> None:
    for suite in SUITES.values():
        assert all((ROOT / one).exists() for one in suite.tests if one.startswith("tests/"))


def test_the_tests_of_vllm_run_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that start together take each other's memory for their own."""
    (options,) = {tuple(one.tests[-2:]) for one in SUITES.values() if "vllm" in one.needs}
    monkeypatch.setattr(suites, "_PROCESSES", 2)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    test = 'def test_a(): assert "PYTEST_XDIST_WORKER" not in os.environ'
    found = run(Suite([*suite(tmp_path, test).tests, *options], ["pytest"]), tmp_path, DEADLINE_S)
    assert (found["ok"], found["tests"]) == (True, 1)


@pytest.mark.parametrize("name", ["parity", "zero"])
def test_both_backends_are_compared_with_peft(name: str) -> None:
    assert any(one.startswith("tests/parity/") for one in SUITES[name].tests)


def test_the_suite_of_ranks_has_a_test_of_each_file_and_a_gpu_for_each_of_two_ranks() -> None:
    *files, _, chosen = SUITES["ranks"].tests
    name, *_ = chosen.split()
    assert all(f"{name}(" in (ROOT / file).read_text() for file in files)
    assert SUITES["ranks"].gpus == 2


@pytest.mark.parametrize("name", ["vllm", "vllm on two ranks"])
@pytest.mark.parametrize(("gpu", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_the_suites_of_vllm_have_a_dtype_that_it_serves_adapters_in(
    name: str, gpu: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    settings = settings_of(name, tiny_qwen3(tmp_path))
    assert settings.dtype == dtype
    check_dtype(settings, engine_args(settings, base_model.skeleton(settings), CONTEXT, settings.dtype))


def test_the_limits_of_bf16_tell_one_adapter_or_seed_from_another(tmp_path: Path) -> None:
    exact = make_reference(tiny_qwen3(tmp_path))
    rounded, prompt = exact.in_dtype("bfloat16"), PROMPTS[1]
    tokens = np.array(exact.greedy("one", prompt, 12))
    rounded.assert_greedy("one", prompt, tokens)
    np.testing.assert_allclose(exact.logprobs("one", prompt), rounded.logprobs("one", prompt), atol=rounded.atol)
    with pytest.raises(AssertionError):
        rounded.assert_greedy("two", prompt, tokens)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(exact.logprobs("one", prompt), rounded.logprobs("two", prompt), atol=rounded.atol)
    wanted = [[1, 2, 3, 4], [5, 6, 7, 8]]
    rounded.assert_repeated([[1, 2, 3, 9], [5, 6, 7, 8]], wanted)
    with pytest.raises(AssertionError):
        rounded.assert_repeated([[1, 9, 3, 4], [5, 9, 7, 8]], wanted)
    with pytest.raises(AssertionError):
        exact.assert_repeated([[1, 2, 3, 9], [5, 6, 7, 8]], wanted)
