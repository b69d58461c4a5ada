"""A worker leaves new connections to those with fewer, takes them if nobody else does, and never waits for long."""

from __future__ import annotations

import logging
import os
import selectors
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from gunicorn.config import Config

from app.server import shared_listener
from app.server.shared_listener import ConnectionCounts, SharedListener

ME, OTHER = 1, 2


CASES = [(1, 0, True), (2, 0, False), (10, 8, True), (11, 8, False), (91, 80, True), (92, 80, False)]


class Worker(SharedListener):
    """Notes what it takes and how long it waits for events, and waits for none."""

    def __init__(self) -> None:
        super().__init__(ME, 1, [], None, 30, Config(), logging.getLogger())
        self.poller = selectors.DefaultSelector()
        self.taken: list[Any] = []
        self.waited: list[float] = []
        self.poller.select = self._select  # type: ignore[method-assign]

    def enqueue_req(self, conn: Any) -> None:
        self.taken.append(conn)

    def _select(self, timeout: float) -> list[Any]:
        self.waited.append(timeout)
        return []


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> ConnectionCounts:
    made = ConnectionCounts()
    monkeypatch.setattr(shared_listener, "COUNTS", made)
    return made


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        yield listener


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(shared_listener.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def worker(counts: ConnectionCounts, listener: socket.socket, clock: list[float]) -> Iterator[Worker]:
    made = Worker()
    made.sockets = [listener]
    made.set_accept_enabled(True)
    made.wait_for_and_dispatch_events(1.0)
    made.waited.clear()
    yield made
    for conn in made.taken:
        conn.close()


@pytest.mark.parametrize(("mine", "others", "takes"), CASES)
def test_a_worker_with_clearly_more_connections_than_another_leaves_a_new_one_to_it(
    worker: Worker, counts: ConnectionCounts, listener: socket.socket, mine: int, others: int, takes: bool
) -> None:
    worker.nr_conns = mine
    counts.put(ME, mine)
    counts.put(OTHER, others)
    worker.accept(listener)
    assert len(worker.taken) == takes


def test_one_that_nobody_takes_is_taken_a_moment_later(
    worker: Worker, counts: ConnectionCounts, listener: socket.socket, clock: list[float]
) -> None:
    worker.nr_conns = 9
    counts.put(OTHER, 0)
    worker.accept(listener)
    worker.set_accept_enabled(True)  # as before each wait
    assert not worker._accepting and not worker.taken
    worker.wait_for_and_dispatch_events(1.0)
    assert worker.waited == [pytest.approx(shared_listener._LEFT_S)]
    clock[0] += shared_listener._LEFT_S
    worker.set_accept_enabled(True)
    assert worker._accepting and len(worker.taken) == 1
    worker.wait_for_and_dispatch_events(1.0)
    assert worker.waited[1:] == [1.0]


def test_many_that_nobody_takes_are_taken_some_at_a_time(
    worker: Worker, counts: ConnectionCounts, listener: socket.socket, clock: list[float]
) -> None:
    """A process that hangs takes none."""
    worker.nr_conns = 9
    counts.put(OTHER, 0)
    with ExitStack() as stack:
        for _ in range(9):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        for taken in (shared_listener._TAKEN, 10):
            worker.accept(listener)
            clock[0] += shared_listener._LEFT_S
            worker.set_accept_enabled(True)
            assert len(worker.taken) == taken


def test_a_worker_whose_arbiter_has_died_ends_its_wait_for_others(
    worker: Worker, counts: ConnectionCounts, listener: socket.socket
) -> None:
    worker.nr_conns = 9
    counts.put(OTHER, 0)
    worker.accept(listener)
    worker.set_accept_enabled(False)
    worker.wait_for_and_dispatch_events(1.0)
    assert worker.waited == [1.0]


def test_one_that_another_has_taken_is_no_fault_and_the_next_is_left_again(
    worker: Worker, counts: ConnectionCounts, listener: socket.socket, clock: list[float]
) -> None:
    worker.nr_conns = 9
    counts.put(OTHER, 0)
    worker.accept(listener)
    listener.accept()[0].close()
    clock[0] += shared_listener._LEFT_S
    worker.set_accept_enabled(True)
    with socket.create_connection(listener.getsockname()):
        worker.accept(listener)
    assert not worker.taken and not worker._accepting


def test_a_full_worker_that_left_a_connection_waits_without_a_spin(
    worker: Worker, counts: ConnectionCounts, listener: socket.socket, clock: list[float]
) -> None:
    worker.nr_conns = worker.worker_connections
    counts.put(OTHER, 0)
    worker.accept(listener)
    clock[0] += 1.0
    worker.wait_for_and_dispatch_events(1.0)
    assert worker.waited == [1.0]


def test_a_worker_that_stops_is_not_waited_for(worker: Worker, counts: ConnectionCounts) -> None:
    counts.put(OTHER, 5)
    assert counts.least() == 0
    worker.alive = False
    worker.set_accept_enabled(False)
    worker.wait_for_and_dispatch_events(1.0)
    assert counts.least() == 5


def test_a_forked_process_shares_the_counts() -> None:
    counts = ConnectionCounts()
    assert counts.least() == 0
    if not (child := os.fork()):
        counts.put(ME, 7)
        os._exit(0)
    os.waitpid(child, 0)
    assert counts.least() == 7
    counts.remove(ME)
    assert counts.least() == 0
