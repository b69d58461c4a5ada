"""The memory that this process and its children may use: the machine's, or less in a control group with a limit, as in
a container. Also counts the processes that the kernel killed for lack of memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS, _OWN, _MACHINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/vmstat")
_BOUND, _KILLS = ("memory.max", "memory.limit_in_bytes"), ("memory.events", "memory.oom_control")


def usable_bytes(groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """The lowest bound of the control groups (version 1 or 2) above this process, at most the machine's memory."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_bounds(groups, own)])


def oom_kills(groups: Path = _GROUPS, own: Path = _OWN, machine: Path = _MACHINE) -> int:
    """The processes that the kernel has killed for lack of memory: in the control group of this process, or on the
    machine where there is none; 0 where it does not say."""
    for file in (*_files(groups, own, _KILLS), machine):
        with suppress(OSError):  # no such group is seen from here
            counts = dict(line.split(maxsplit=1) for line in file.read_text().splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return 0


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _bounds(groups: Path, own: Path) -> Iterator[int]:
    for file in _files(groups, own, _BOUND):
        with suppress(OSError, ValueError):  # no such group is seen from here, or it is "max": no bound
            yield int(file.read_text())


def _files(groups: Path, own: Path, names: tuple[str, str]) -> Iterator[Path]:
    """The files of the groups, from the process's own group up to the root, by their names in version 2 and 1."""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                root, name = groups, names[0]
            elif "memory" in controllers.split(","):
                root, name = groups / "memory", names[1]
            else:
                continue
            group = root / path.strip("/")
            yield from (parent / name for parent in (group, *group.parents) if parent.is_relative_to(root))
