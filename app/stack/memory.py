"""The memory that this process and its children may use: the machine's, or less in a control group with a bound, as in
a container.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_bytes(groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """The lowest bound of the control groups (version 1 or 2) above this process, at most the machine's memory."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_bounds(groups, own)])


def _bounds(groups: Path, own: Path) -> Iterator[int]:
    for file in _files(groups, own):
        with suppress(OSError, ValueError):  # no such group is seen from here, or it is "max": no bound
            yield int(file.read_text())


def _files(groups: Path, own: Path) -> Iterator[Path]:
    """The files with the bounds of the groups, from the process's own group up to the root."""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                root, name = groups, "memory.max"
            elif "memory" in controllers.split(","):
                root, name = groups / "memory", "memory.limit_in_bytes"
            else:
                continue
            group = root / path.strip("/")
            yield from (parent / name for parent in (group, *group.parents) if parent.is_relative_to(root))
