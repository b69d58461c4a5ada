"""Grandchildren that left their process group (an engine with its own session) and outlived their parent."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt() -> None:
    """From now on orphaned descendants become our children instead of init's."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill(known: Collection[int]) -> None:
    """Kill and reap each of our children that is not `known`; the children of those become ours, so repeat."""
    while strays := _children() - set(known):
        for pid in strays:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _children() -> set[int]:
    me = str(os.getpid())
    return {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _parent(entry) == me}


def _parent(process: Path) -> str:
    try:
        # The command name before the last ')' may hold anything.
        return (process / "stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return ""
