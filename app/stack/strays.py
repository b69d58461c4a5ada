"""Finds and kills grandchildren that left their process group (an engine with its own session) and outlived their
parent."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_TRACKER = b"resource_tracker import main"
_TRACKERS_S = 5.0
_TICK_S = 0.02


def adopt() -> None:
    """Makes orphaned descendants children of this process, and not of init, from now on."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill(known: Collection[int]) -> None:
    """Kills and reaps each child of this process that is not `known`. Their children then become children of this
    process, so the work repeats.

    Python's resource trackers come last and get time to end by themselves: once the processes they served are gone,
    they remove the shared memory that those processes left.
    """

    def strays() -> set[int]:
        return {pid for pid, (parent, _) in _kin().items() if parent == os.getpid()} - set(known)

    while others := {pid for pid in strays() if not _is_tracker(pid)}:
        _kill(others)
    deadline = time.monotonic() + _TRACKERS_S
    while (trackers := strays()) and time.monotonic() < deadline:
        _reap(trackers, os.WNOHANG)
        time.sleep(_TICK_S)
    _kill(trackers)


def kill_group(group: int) -> None:
    """Kills the processes of a group except resource trackers; `kill` ends those."""
    killed: set[int] = set()
    while found := {pid for pid, (_, its) in _kin().items() if its == group and not _is_tracker(pid)} - killed:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= found


def family(pid: int) -> set[int]:
    """A process and its descendants."""
    kin, found = _kin(), {pid}
    while more := {each for each, (parent, _) in kin.items() if parent in found} - found:
        found |= more
    return found


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _reap(pids, 0)


def _reap(pids: Iterable[int], options: int) -> None:
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, options)


def _is_tracker(pid: int) -> bool:
    with suppress(OSError):
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _kin() -> dict[int, tuple[int, int]]:
    """The parent and the process group of every process."""
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):  # the process has just ended
                # The command name before the last ')' may hold any character.
                _, parent, group, *_ = (process / "stat").read_text().rpartition(")")[2].split()
                found[int(process.name)] = int(parent), int(group)
    return found
