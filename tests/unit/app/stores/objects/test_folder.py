"""Concurrent writes of one key in a folder store. tests/conformance covers its other promises."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from app.stores.objects.folder import FolderStore


def test_who_is_overtaken_while_he_writes_changes_nothing(tmp_path: Path):
    """The writer had checked, and the key was free.

    Its source is a pipe, which shows when it reads and blocks it.
    """
    store, pipe, won = FolderStore(tmp_path / "objects", "secret", "http://x"), tmp_path / "pipe", list[bool]()
    os.mkfifo(pipe)
    slow = threading.Thread(target=lambda: won.append(store.put_new("a/key", pipe)), daemon=True)
    slow.start()
    with pipe.open("wb") as source:
        assert store.put_new("a/key", b"first")
        source.write(b"second")
    slow.join(60)
    assert (won, store.read("a/key")) == ([False], b"first")
