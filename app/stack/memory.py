"""The memory and the cores that this process and its children may use: the machine's, or less in a control group with a
limit, as in a container. Also says how much memory is free, how much of a file system in memory new weights may take,
and counts the processes that the kernel killed for lack of memory.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_GROUPS, _OWN, _MACHINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/vmstat")
LEFT_TO_OTHERS = 2**29
"""The most bytes that new weights leave to other users of their file system, such as vLLM's message queues."""
_LEFT_TO_VLLM = 2**28  # one queue of 241 MiB


class _Names(NamedTuple):
    """The names of a control group's files in one version, and of one count in its memory.stat: the pages of files that
    were not used lately."""

    bound: str
    used: str
    kills: str
    unused_pages: str
    quota: str


_V1 = _Names(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file", "cpu.cfs_quota_us"
)
_V2 = _Names("memory.max", "memory.current", "memory.events", "inactive_file", "cpu.max")
_PERIOD = "cpu.cfs_period_us"


def usable_bytes(groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """The lowest bound of the control groups (version 1 or 2) above this process, at most the machine's memory."""
    return min([_machine_bytes(), *(bound for bound, _ in _bounds(groups, own))])


def free_bytes(available: int, groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """The least that any of these control groups leaves free, at most the `available` bytes of the machine."""
    return min([available, *(bound - used for bound, used in _bounds(groups, own))])


def usable_cores(groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """The cores of this process, at most the lowest CPU quota of the control groups above it, rounded up."""
    return min([len(os.sched_getaffinity(0)), *_quotas(groups, own)])


def oom_kills(groups: Path = _GROUPS, own: Path = _OWN, machine: Path = _MACHINE) -> int:
    """The processes that the kernel has killed for lack of memory: in the control group of this process, or on the
    machine where there is none; 0 where it does not say."""
    for file in (*(group / names.kills for group, names in _own_groups(groups, own, "memory")), machine):
        counts = _counts(file)
        if "oom_kill" in counts:
            return counts["oom_kill"]
    return 0


def room_for_weights(folder: Path, most: int) -> int:
    """The bytes that new weights may take in a folder: `most`, but they leave half of its file system to others, at
    least what vLLM needs to start, if it has that much, and at most LEFT_TO_OTHERS."""
    total = file_system_bytes(folder)
    least = _LEFT_TO_VLLM if total > _LEFT_TO_VLLM else 0
    return min(most, total - min(max(total // 2, least), LEFT_TO_OTHERS))


def file_system_bytes(folder: Path) -> int:
    """The size of the file system of a folder, which may be missing yet."""
    return shutil.disk_usage(next(filter(os.path.exists, (folder, *folder.parents)))).total


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _bounds(groups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """The bound of each group that has one (version 1 has 8 EiB for none), and the bytes in use there. Pages of files
    that were not used lately are not counted: the kernel takes them back before it kills a process."""
    for group, names in _own_groups(groups, own, "memory"):
        if (bound := _number(group / names.bound)) is not None and bound < _machine_bytes():
            unused = _counts(group / "memory.stat").get(names.unused_pages, 0)
            yield bound, (_number(group / names.used) or 0) - unused


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _quotas(groups: Path, own: Path) -> Iterator[int]:
    """The quotas in cores. Version 2 has "QUOTA PERIOD" in one file and "max" for no quota, version 1 -1."""
    for group, names in _own_groups(groups, own, "cpu"):
        with suppress(OSError, ValueError):  # no such group is seen from here, or there is no quota
            quota, *period = (group / names.quota).read_text().split()
            per = int(period[0] if period else (group / _PERIOD).read_text())
            if int(quota) > 0:
                yield math.ceil(int(quota) / per)


def _number(file: Path) -> int | None:
    """The number in a file; None where no such group is seen from here, or it is "max": no bound."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _counts(file: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number in each line; none where the kernel has no such file."""
    try:
        return {name: int(number) for name, number in map(str.split, file.read_text().splitlines())}
    except (OSError, ValueError):
        return {}


def _own_groups(groups: Path, own: Path, controller: str) -> Iterator[tuple[Path, _Names]]:
    """The folders of a controller's groups, from the process's own group up to the root, and the names of their
    files."""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                root, names = groups, _V2
            elif controller in controllers.split(","):
                root, names = groups / controller, _V1
            else:
                continue
            group = root / path.strip("/")
            yield from ((parent, names) for parent in (group, *group.parents) if parent.is_relative_to(root))
