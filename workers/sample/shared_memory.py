"""The shared memory of a sampler's engine, which stays allocated when all of its processes are killed at once.

vLLM allocates hundreds of MB. Python's resource tracker removes them if the tracker process survives; otherwise the
sampler's next process removes them, from a list that the earlier process wrote.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from app.stack import child
from app.stack.data_folder import write_private

_FOLDER = Path("/dev/shm")
# Prefixes of Python's, torch's and NCCL's segments, and of those of vLLM's ranks on a CPU. Shared-memory transfers use
# folders, and the CUDA driver's segments belong to all of its processes.
_KINDS = ("psm_", "sem.", "torch_", "nccl-", "vllm_dist_")


def note(file: Path) -> None:
    """Writes down which shared memory this process and its descendants have mapped."""
    mapped = {inode for pid in child.family(os.getpid()) for inode in _mapped(pid)}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_private(file, json.dumps({name: inode for name, inode in _segments() if inode in mapped}))


def remove_noted(file: Path) -> None:
    """Removes the shared memory that an earlier process wrote down, if it is still the same."""
    if not file.exists():
        return
    for name, inode in json.loads(file.read_text()).items():
        with suppress(FileNotFoundError):
            if (_FOLDER / name).stat().st_ino == inode:
                (_FOLDER / name).unlink()
    file.unlink()


def _segments() -> Iterator[tuple[str, int]]:
    """Name and inode of every segment of these kinds in shared memory, from any process; nothing where there is
    none."""
    for segment in _FOLDER.glob("*"):
        if segment.name.startswith(_KINDS):
            with suppress(FileNotFoundError):  # its owner has just removed it
                yield segment.name, segment.stat().st_ino


def _mapped(pid: int) -> Iterator[int]:
    """Inodes of the files in shared memory that a process has mapped; none for a process that has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            *_, inode, path = [*line.split(maxsplit=5), ""][:6]
            if path.startswith(f"{_FOLDER}/"):
                yield int(inode)
