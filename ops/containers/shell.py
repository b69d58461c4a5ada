"""Child processes for commands, and the folder that holds all files made here."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "containers"


def run(command: Sequence[str | Path], environ: Mapping[str, str] | None = None) -> None:
    """Runs a command. Raises CalledProcessError when it fails."""
    subprocess.run(command, cwd=ROOT, env={**os.environ, **(environ or {})}, check=True)


def answer(command: Sequence[str | Path], environ: Mapping[str, str] | None = None) -> str:
    """Runs a command and returns its stdout. Raises RuntimeError with all of its output when it fails."""
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **(environ or {})}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout.strip()


def succeeds(command: Sequence[str | Path], environ: Mapping[str, str] | None = None) -> bool:
    try:
        answer(command, environ)
    except (RuntimeError, FileNotFoundError):
        return False
    return True


def wait_until(what: str, condition: Callable[[], bool], seconds: float = 300.0) -> None:
    """Polls until the condition holds. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.2)
