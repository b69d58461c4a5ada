"""Starts the recipes in a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.confined import surroundings


def run(program: str, url: str, key: str, arguments: list[str], folder: Path) -> int:
    """Runs a program of this package in a process that reaches the server alone; returns its exit code."""
    command = [sys.executable, "-m", f"tests.recipes.{program}", url, *arguments]
    environment = {**surroundings(url, folder / "home"), "TINKER_API_KEY": key}
    with (folder / "output").open("w") as output:
        return subprocess.run(
            command, cwd=folder, env=environment, stdout=output, stderr=output, check=False
        ).returncode
