"""Local files that appear whole or not at all, and stay after a power cut."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """A file to write; `target` is replaced by it, on disk, when the block ends well, and untouched otherwise."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary_file(target.parent) as (file, path):
        yield file
        flush(file)
        path.replace(target)
        flush_folder(target.parent)


@contextmanager
def temporary_file(folder: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A new file in `folder` with a name of its own, gone at the end unless it was renamed."""
    handle, name = tempfile.mkstemp(dir=folder, prefix=".tmp-")
    path = Path(name)
    try:
        with open(handle, "wb") as file:  # noqa: PTH123 (a descriptor, not a path)
            yield file, path
    finally:
        path.unlink(missing_ok=True)


def flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Make the names in `folder` last; without it a new file can vanish with the power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
