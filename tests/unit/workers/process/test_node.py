from __future__ import annotations

import os
import time
from collections.abc import Callable
from io import FileIO

import pytest

from workers.process import multinode


def await_false(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_pipe_holds_while_it_is_heard_of_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    line = multinode.Lifeline(FileIO(read))
    assert line.held()
    monkeypatch.setattr(multinode, "SILENCE_S", 0.0)
    await_false(line.held)
    monkeypatch.setattr(multinode, "SILENCE_S", 60.0)
    os.write(write, b"\n")
    assert line.held()
    os.close(write)
    await_false(line.held)
