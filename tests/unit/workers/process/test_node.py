from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path

import pytest

from app.errors import SetupError
from workers.process import multinode, orderly_stop


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


def test_rank_0_of_a_broken_group_is_killed_before_it_gives_its_op_back() -> None:
    assert multinode.BROKEN_S < orderly_stop._WITHIN_S < multinode.RANKS_S < multinode._GRACE_S


def test_the_port_of_the_ranks_is_free_and_none_of_those_that_outgoing_connections_get(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    start = multinode.free_port()
    assert start < first_outgoing
    monkeypatch.setattr(multinode, "_PORTS", range(start, start + 100))
    with ExitStack() as taken:
        for port in range(start, start + 100):
            listener = taken.enter_context(socket.socket())
            with suppress(OSError):
                listener.bind(("", port))
        with pytest.raises(SetupError, match="none of 100 ports"):
            multinode.free_port()
