"""Files that a repository's host and its contributors' tools read."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.ops.compose import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
# Made by tools, not read by people.
_MADE = (".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "build", "data", "dist")
_DEFAULT_INDEX = "pypi" + ".org"


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in yaml.safe_load(workflow.read_text())["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_every_workflow_runs_the_same_script_as_everybody_else(workflow: Path):
    assert "bash .ci/run" in [step.get("run") for step in steps(workflow)]


def test_the_script_of_ci_runs_programs_that_are_there():
    programs = re.findall(r"^(?:python3|bash|sh) (\S+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert programs and all((ROOT / program).is_file() for program in programs)


def test_the_script_of_ci_checks_the_chart_the_alerts_and_the_console():
    script = (ROOT / ".ci" / "run").read_text()
    made = re.findall(r"^(?:make|where_there_is \S+) (\S+)$", script, re.MULTILINE)
    assert {"chart", "alerts", "ui", "test"} <= set(made)


def test_a_release_is_made_of_what_ci_passed_on():
    commands = [step.get("run", "") for step in steps(ROOT / ".github" / "workflows" / "release.yml")]
    order = [
        next(i for i, run in enumerate(commands) if word in run) for word in (".ci/run", "make dist", "gh release")
    ]
    assert order == sorted(order)


@pytest.mark.parametrize("form", [form for form in FORMS if form.stem != "config"], ids=lambda path: path.name)
def test_each_question_of_a_form_has_a_name_of_its_own(form: Path):
    read = yaml.safe_load(form.read_text())
    asked = [part["id"] for part in read["body"] if part["type"] != "markdown"]
    assert read["name"] and read["description"]
    assert len(asked) == len(set(asked)) > 0


def test_the_hooks_of_pre_commit_run_the_tools_of_the_environment():
    hooks = [
        hook
        for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
        for hook in repo["hooks"]
    ]
    assert {hook["id"] for hook in hooks} == {"ruff-check", "ruff-format", "mypy"}
    for hook in hooks:
        assert shutil.which(Path(hook["entry"].split()[0]).name, path=str(Path(sys.executable).parent))


def test_no_file_spells_out_the_host_of_the_default_package_index():
    ours = (entry for entry in ROOT.iterdir() if entry.name not in _MADE)
    files = (path for entry in ours for path in (entry.rglob("*") if entry.is_dir() else [entry]))
    # Other tests compile modules meanwhile: files in __pycache__ come and go.
    kept = (path for path in files if "__pycache__" not in path.parts and path.is_file())
    assert [path for path in kept if _DEFAULT_INDEX.encode() in path.read_bytes()] == []


CPU_INDEX = ["--index-url"]


@pytest.mark.parametrize(
    ("driver", "reachable", "options", "expected"),
    [
        (False, True, [], [CPU_INDEX]),
        (False, False, [], [CPU_INDEX, []]),
        (False, True, ["--pre"], [["--pre"]]),
        (False, True, ["--index-url", "URL"], [["--index-url"]]),
        (True, True, [], [[]]),
    ],
    ids=["CPU index", "no CPU index", "options of the caller", "index of the caller", "NVIDIA driver"],
)
def test_a_machine_without_an_nvidia_driver_asks_for_the_cpu_build_of_torch_first(
    tmp_path: Path, driver: bool, reachable: bool, options: list[str], expected: list[list[str]]
):
    """A stand-in for pip records its arguments, and fails for an index that cannot be reached."""
    noted = tmp_path / "noted"
    refuse = "" if reachable else 'case "$*" in *--index-url*) exit 1;; esac'
    python = script(tmp_path / "python", f'echo "$@" >> {noted}\n{refuse}\n')
    if driver:
        script(tmp_path / "nvidia-smi", "")
    subprocess.run([ROOT / "ops" / "install_torch.sh", python, *options], check=True, env={"PATH": str(tmp_path)})
    asked = [line.split() for line in noted.read_text().splitlines()]
    assert all("--no-deps" in words and words[-1] == "torch" for words in asked), "no index but pip's has all of it"
    assert [[word for word in words if word in (*CPU_INDEX, "--pre")] for words in asked] == expected


def checked(tmp_path: Path, what: str, said: str) -> subprocess.CompletedProcess[str]:
    """Runs ops/check_setup.sh with a Python that prints `said` and then is what the script asks for, or not."""
    python = script(tmp_path / "python", f'case "$2" in *exit*) exit 1;; esac\necho {said}\n')
    return subprocess.run([ROOT / "ops" / "check_setup.sh", python, what], capture_output=True, text=True, check=False)


def test_a_python_that_is_too_old_is_named_with_the_remedy(tmp_path: Path):
    refused = checked(tmp_path, "version", "3.10")
    assert refused.returncode and refused.stderr.startswith("Python 3.10 is too old: Tinsmith needs 3.11 or newer")
    assert "make setup PYTHON=" in refused.stderr
    command = [ROOT / "ops" / "check_setup.sh", sys.executable, "version"]
    assert subprocess.run(command, check=True, capture_output=True).stderr == b""


@pytest.mark.parametrize("what", ["version", "torch"])
def test_a_system_that_is_not_linux_is_named_with_what_runs_there(tmp_path: Path, what: str):
    script(tmp_path / "uname", "echo Darwin\n")
    command = [ROOT / "ops" / "check_setup.sh", sys.executable, what]
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    refused = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert refused.returncode and refused.stderr.startswith("The server of Tinsmith runs on Linux, and this is Darwin.")
    assert "pip install tinker" in refused.stderr and "docs/containers.md" in refused.stderr


def test_the_tests_on_a_cpu_are_not_installed_beside_a_cuda_build_of_torch(tmp_path: Path):
    refused = checked(tmp_path, "torch", "2.13.0")
    assert refused.returncode and "this environment has torch 2.13.0. Run `make test TORCH_ARGS=" in refused.stderr
    assert "`make gpu-check`" in refused.stderr
    assert checked(tmp_path, "torch", "2.13.0+cpu").returncode == 0


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path


def test_an_example_has_at_most_85_lines():
    programs = [path for path in (ROOT / "examples").iterdir() if path.suffix in {".py", ".sh"}]
    assert programs and [path.name for path in programs if len(path.read_text().splitlines()) > 85] == []
