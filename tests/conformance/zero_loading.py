"""A rank that loads a base model and writes the most memory that it took, above what its imports take."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psutil

from app import malloc
from app.settings import BaseModelSettings
from workers.backends.training import backends

_EVERY_S = 0.005


def main(settings: str, folder: str) -> None:
    malloc.give_large_blocks_back()  # what malloc keeps of freed blocks would count
    backend = backends.create(BaseModelSettings.model_validate_json(settings))
    opened, most, before = threading.Event(), [0], written()

    def watch() -> None:
        while not opened.wait(_EVERY_S):
            most[0] = max(most[0], written() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    backend.open()
    opened.set()
    watcher.join()
    (Path(folder) / os.environ["RANK"]).write_text(str(most[0]))
    os._exit(0)


def written() -> int:
    """Bytes in memory without pages of files, which the system takes back when it needs memory."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)
