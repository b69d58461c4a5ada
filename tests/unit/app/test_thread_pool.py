"""The pool of threads that run requests."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from app import thread_pool
from app.thread_pool import MOST_BUSY, WAITS_S, Sender, Sends, ThreadPool

MOST = 100


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    made = ThreadPool(MOST)
    yield made
    made.shutdown()


@pytest.fixture
def answer() -> Iterator[threading.Event]:
    """An answer that calls wait for. It comes at the end of a test at the latest."""
    made = threading.Event()
    yield made
    made.set()


class Calls:
    """Counts the calls that have a thread, all in all and at a time."""

    def __init__(self, answer: threading.Event) -> None:
        self._lock = threading.Lock()
        self._answer = answer
        self.starts = threading.Semaphore(0)
        self.begun = self.most_at_once = self._now = 0

    def wait(self) -> None:
        with self._lock:
            self.begun += 1
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        self.starts.release()
        assert self._answer.wait(60)
        with self._lock:
            self._now -= 1


def start_more_until(pool: ThreadPool, until: Callable[[], object]) -> None:
    """Starts more threads, round by round, until something is true."""
    deadline = time.monotonic() + 60
    while not until():
        assert time.monotonic() < deadline
        time.sleep(2 * WAITS_S)
        pool.start_more()


def test_a_call_gives_its_result_or_its_error(pool: ThreadPool):
    assert pool.submit(divmod, 7, 2).result(60) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 7, 0).result(60)
    assert pool.submit(divmod, 7, 2).result(60) == (3, 1)


def test_few_calls_run_at_once(pool: ThreadPool, answer: threading.Event, monkeypatch: pytest.MonkeyPatch):
    """Each further thread would wait for Python's lock, and make the others wait."""
    monkeypatch.setattr(thread_pool, "WAITS_S", 3600)
    calls = Calls(answer)
    for _ in range(5 * MOST_BUSY):
        pool.submit(calls.wait)
    start_more_until(pool, lambda: calls.begun >= MOST_BUSY)
    pool.start_more()
    assert (pool.is_behind, pool.lacking) == (True, 0), "more threads may start"
    answer.set()
    start_more_until(pool, lambda: calls.begun == 5 * MOST_BUSY)
    assert calls.most_at_once == MOST_BUSY


def test_calls_that_wait_hold_up_no_other_call(pool: ThreadPool, answer: threading.Event):
    for _ in range(MOST - 1):
        pool.submit(Calls(answer).wait)
    result = pool.submit(divmod, 7, 2)
    start_more_until(pool, result.done)
    assert result.result() == (3, 1)


def test_many_calls_that_wait_have_their_threads_within_few_rounds(
    pool: ThreadPool, answer: threading.Event, monkeypatch: pytest.MonkeyPatch
):
    """A burst of streams must not wait for as long as it has streams."""
    monkeypatch.setattr(thread_pool, "WAITS_S", 0)
    calls, rounds, begun = Calls(answer), 0, 0
    for _ in range(16 * MOST_BUSY):
        pool.submit(calls.wait)
    while begun < 16 * MOST_BUSY:
        while begun < len(pool._threads):
            assert calls.starts.acquire(timeout=60)
            begun += 1
        pool.start_more()
        rounds += 1
    assert rounds <= 8


def test_calls_that_wait_take_no_more_threads_than_the_most(answer: threading.Event):
    pool, calls = ThreadPool(6), Calls(answer)
    for _ in range(10):
        pool.submit(calls.wait)
    start_more_until(pool, lambda: calls.begun == 6)
    pool.start_more()
    assert (pool.is_behind, pool.lacking) == (True, 4)
    answer.set()
    start_more_until(pool, lambda: calls.begun == 10)
    assert calls.most_at_once == 6
    pool.shutdown()


def test_after_calls_that_waited_few_threads_are_left(pool: ThreadPool, answer: threading.Event):
    before, calls = set(threading.enumerate()), Calls(answer)
    for _ in range(MOST):
        pool.submit(calls.wait)
    start_more_until(pool, lambda: calls.begun == MOST)
    assert len(set(threading.enumerate()) - before) == MOST
    answer.set()
    start_more_until(pool, lambda: len(set(threading.enumerate()) - before) <= MOST_BUSY)
    assert pool.submit(divmod, 7, 2).result(60) == (3, 1)


def test_the_slowest_readers_lose_their_connections_first_and_none_in_its_first_second(
    monkeypatch: pytest.MonkeyPatch,
):
    now, sends = [100.0], Sends()
    monkeypatch.setattr(thread_pool.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(thread_pool, "_SLOW_BYTES_S", 2000)
    with contextlib.ExitStack() as stack:
        senders, clients = [], []
        for size in (2100, 10, 2000, 1):
            ours, theirs = (stack.enter_context(each) for each in socket.socketpair())
            theirs.settimeout(10)
            senders.append(Sender(ours, sends))
            senders[-1].sendall(b"a" * size)
            assert theirs.recv(4000) == b"a" * size
            clients.append(theirs)
        with sends.waiting(senders[0]), sends.waiting(senders[1]), sends.waiting(senders[2]):
            now[0] += 0.9
            assert sends.end_slowest(5) == 0
            now[0] += 0.2
            with sends.waiting(senders[3]):
                assert sends.end_slowest(2) == 2
        assert [clients[i].recv(1) for i in (1, 2)] == [b"", b""]
        for i in (0, 3):
            senders[i].sendall(b"b")
            assert clients[i].recv(1) == b"b"
        assert sends.end_slowest(5) == 0, "none waits any more"
        with sends.waiting(senders[0]):
            assert sends.end_slowest(5) == 1, "earlier waits count"
        senders[3].sent = 2300
        with sends.waiting(senders[3]):
            now[0] += 1.1
            assert sends.end_slowest(5) == 0, "it reads fast"


def test_a_response_is_sent_whole_to_a_client_that_reads_it_in_parts():
    ours, theirs = socket.socketpair()
    content = bytes(range(256)) * 2**14
    with ours, theirs, theirs.makefile("rb") as received:
        sending = threading.Thread(target=Sender(ours, Sends()).sendall, args=(content,))
        sending.start()
        assert received.read(len(content)) == content
        sending.join(60)


def test_a_signal_that_comes_while_a_call_is_submitted_may_end_the_pool():
    pool = ThreadPool(MOST)

    def handle_signal() -> None:
        with pool._lock:
            pool.shutdown(wait=False)

    handler = threading.Thread(target=handle_signal, daemon=True)
    handler.start()
    handler.join(60)
    assert not handler.is_alive()


def test_a_pool_that_ends_ends_its_threads():
    before, pool = set(threading.enumerate()), ThreadPool(MOST)
    pool.submit(divmod, 7, 2).result(60)
    pool.shutdown()
    assert set(threading.enumerate()) <= before
