"""The shared memory of a sampler's engine, which stays taken when all of its processes are killed at once.

vLLM's is hundreds of MB. Python's resource tracker removes it if that process lives on; else the sampler's next process
does, by a note of what there was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from app.stack import strays
from app.stack.data_folder import write_private

_FOLDER = Path("/dev/shm")
# Python's, torch's, NCCL's, and those of vLLM's ranks on a CPU. Hand-overs have folders, and those of the CUDA driver
# are for all of its processes.
_KINDS = ("psm_", "sem.", "torch_", "nccl-", "vllm_dist_")


def note(file: Path) -> None:
    """Write down which shared memory this process and its descendants have mapped."""
    mapped = {inode for pid in strays.family(os.getpid()) for inode in _mapped(pid)}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_private(file, json.dumps({name: inode for name, inode in _segments() if inode in mapped}))


def remove_noted(file: Path) -> None:
    """Remove what an earlier process wrote down, if it is still the same."""
    if not file.exists():
        return
    for name, inode in json.loads(file.read_text()).items():
        with suppress(FileNotFoundError):
            if (_FOLDER / name).stat().st_ino == inode:
                (_FOLDER / name).unlink()
    file.unlink()


def _segments() -> Iterator[tuple[str, int]]:
    """Name and inode of everything of these kinds in shared memory, whoever made it; nothing where there is none."""
    for segment in _FOLDER.glob("*"):
        if segment.name.startswith(_KINDS):
            with suppress(FileNotFoundError):  # its owner has just removed it
                yield segment.name, segment.stat().st_ino


def _mapped(pid: int) -> Iterator[int]:
    """Inodes of the files in shared memory that a process has mapped; none of one that has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            *_, inode, path = [*line.split(maxsplit=5), ""][:6]
            if path.startswith(f"{_FOLDER}/"):
                yield int(inode)
