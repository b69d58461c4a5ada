"""The checks of `pip check` and of pip's report, with a stand-in for an environment's Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ops import hashes
from tests.first_hour import environment as environments
from tests.first_hour.environment import _GPU, _WRONG_TAG, Environment, InstallError, _check, resolve_gpu

PINS = hashes.all_pins()


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


@pytest.fixture
def resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Resolves the GPU set with a pip that reports the packages of constraints-gpu.txt and some others, changed so."""

    def resolve(machine: str = "x86_64", **changed: str | None) -> None:
        pinned = hashes.pins(_GPU.read_text()) | {"tinsmith": "0.1.0", "Typing_Extensions": PINS["typing-extensions"]}
        found = {name: version for name, version in (pinned | changed).items() if version}
        packages = [{"metadata": {"name": name, "version": version}} for name, version in found.items()]
        report = {"install": packages, "environment": {"platform_machine": machine}}
        (tmp_path / "report.json").write_text(json.dumps(report))
        script = f'case "$*" in *"--dry-run --report - -c {_GPU} "*) cat {tmp_path}/report.json;; esac'
        monkeypatch.setattr(environments, "_fresh", lambda folder: environment(folder, script))
        resolve_gpu(tmp_path / "environment", Path("tinsmith.whl"))

    return resolve


def test_the_gpu_set_resolves_to_the_pinned_versions(resolve):
    resolve()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"vllm": "0.1"}, f"differently: vllm 0.1, pinned is {PINS['vllm']}$"),
        ({"Typing_Extensions": "1"}, f"differently: typing-extensions 1, pinned is {PINS['typing-extensions']}$"),
        ({"news": "2"}, "differently: news 2, pinned is none$"),
        ({"triton": None}, r"differently: without triton, which constraints-gpu\.txt pins$"),
    ],
    ids=["stale on a GPU", "stale on all machines", "not pinned", "pinned in vain"],
)
def test_a_gpu_set_that_resolves_differently_is_refused_with_the_package(resolve, changed, said):
    with pytest.raises(InstallError, match=said):
        resolve(**changed)


def test_another_processor_may_lack_packages_of_the_gpu_set(resolve):
    resolve("aarch64", triton=None)
