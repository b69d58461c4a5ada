"""Suspended requests: the worker's event loop keeps them without a thread, and calls the application again."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from gunicorn.config import Config
from gunicorn.glogging import Logger
from gunicorn.workers.gthread import TConn

from app import gunicorn_worker
from app.gunicorn_worker import Worker
from app.suspension import SUSPENSION, Ends, Suspension

LONG_S = 600.0


class Application:
    """A WSGI application that suspends each request below /wait, and answers with the number of its call."""

    def __init__(self) -> None:
        self.found: list[Suspension] = []
        self.left: list[Suspension] = []
        self.over: list[str] = []
        self.seconds = LONG_S
        self.before_suspending: Callable[[Suspension], None] = lambda suspension: None

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        suspension: Suspension | None = environ.get(SUSPENSION)
        body = environ["wsgi.input"].read()
        if environ["PATH_INFO"].startswith("/wait") and suspension is not None:
            if suspension.is_over:
                self.over.append(environ["PATH_INFO"])
            else:
                self.found.append(suspension)
                self.before_suspending(suspension)
                suspension.suspend(self.seconds, lambda: self.left.append(suspension))
                body = b"thrown away"
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]


@pytest.fixture
def application() -> Application:
    return Application()


@pytest.fixture
def worker(application: Application) -> Iterator[Worker]:
    """A worker with one thread. Tests turn its event loop."""
    config = Config()
    config.set("threads", 1)
    made = Worker(1, 1, [], None, 30, config, Logger(config))
    made.poller, made.tpool = gunicorn_worker.selectors.DefaultSelector(), made.get_thread_pool()
    made.method_queue.init()
    made.poller.register(
        made.method_queue.fileno(), gunicorn_worker.selectors.EVENT_READ, made.method_queue.run_callbacks
    )
    made.wsgi = gunicorn_worker.partial(made._call, application)
    yield made
    made.tpool.shutdown()
    made.poller.close()
    made.method_queue.close()


class Client:
    """A connection to the worker."""

    def __init__(self, worker: Worker, stack: contextlib.ExitStack) -> None:
        ours, self.sock = (stack.enter_context(each) for each in socket.socketpair())
        worker.nr_conns += 1
        self._worker = worker
        self.conn = TConn(worker.cfg, ours, ("1.2.3.4", 5), ("5.6.7.8", 9))
        self.sock.setblocking(False)

    def ask(self, path: str = "/wait", body: bytes = b"hello", more: bytes = b"", head: bytes = b"") -> None:
        size = str(len(body)).encode()
        self.sock.sendall(
            b"POST " + path.encode() + b" HTTP/1.1\r\nHost: a\r\nX-API-Key: k\r\n" + head + b"Content-Length: " + size
            + b"\r\n\r\n" + body + more
        )  # fmt: skip
        self._worker.enqueue_req(self.conn)

    def answer(self) -> bytes:
        """The answers so far."""
        with contextlib.suppress(BlockingIOError):
            return self.sock.recv(2**20)
        return b""


@pytest.fixture
def connect(worker: Worker) -> Iterator[Callable[[], Client]]:
    with contextlib.ExitStack() as stack:
        yield lambda: Client(worker, stack)


def turn(worker: Worker, until: Callable[[], object]) -> None:
    """Runs the event loop until something is true."""
    deadline = time.monotonic() + 60
    while not until():
        assert time.monotonic() < deadline
        worker.wait_for_and_dispatch_events(0.1)
        worker.murder_pending()


def suspend(worker: Worker, clients: list[Client], **options: Any) -> None:
    for client in clients:
        client.ask(**options)
    turn(worker, lambda: len(worker._suspended) == len(clients))


def test_suspended_requests_take_no_thread_and_are_answered_when_they_are_resumed(
    worker: Worker, application: Application, connect: Callable[[], Client]
) -> None:
    clients = [connect() for _ in range(30)]
    suspend(worker, clients)
    other = connect()
    other.ask("/other")
    turn(worker, lambda: other.answer().endswith(b"hello"))
    assert [client.answer() for client in clients] == [b""] * 30
    for suspension in application.found:
        suspension.resume()
        suspension.resume()
    turn(worker, lambda: len(application.over) == 30)
    answers = [b""] * 30

    def all_answered() -> bool:
        answers[:] = [so_far + client.answer() for so_far, client in zip(answers, clients, strict=True)]
        return all(answer.endswith(b"hello") for answer in answers)

    turn(worker, all_answered)
    assert all(answer.count(b"HTTP/1.1 200") == 1 for answer in answers)
    # The loop hears of the end of a request a moment after its client.
    turn(worker, lambda: (worker._requests, worker._suspended, worker._resumed) == ({}, set(), 0))
    assert len(application.left) == 30


def test_a_request_that_is_resumed_before_it_is_suspended_is_answered(
    worker: Worker, application: Application, connect: Callable[[], Client]
) -> None:
    application.before_suspending = lambda suspension: suspension.resume()
    client = connect()
    client.ask()
    turn(worker, lambda: client.answer().endswith(b"hello"))


def test_a_suspended_request_whose_time_is_over_is_answered(
    worker: Worker, application: Application, connect: Callable[[], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect()
    suspend(worker, [client])
    now = time.monotonic()
    monkeypatch.setattr(gunicorn_worker.time, "monotonic", lambda: now + LONG_S / 2)
    worker.murder_pending()
    assert worker._suspended
    monkeypatch.setattr(gunicorn_worker.time, "monotonic", lambda: now + LONG_S + 5)
    worker.murder_pending()
    monkeypatch.undo()
    turn(worker, lambda: client.answer().endswith(b"hello"))
    assert application.left == application.found


def test_the_event_loop_waits_no_longer_than_the_suspended_request(
    worker: Worker, application: Application, connect: Callable[[], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    suspend(worker, [connect()])
    application.seconds = 300.0
    last = connect()
    last.ask()
    turn(worker, lambda: len(worker._suspended) == 2)
    monkeypatch.setattr(worker.poller, "select", lambda timeout: waits.append(timeout) or [])
    worker.wait_for_and_dispatch_events(1.0)
    worker.wait_for_and_dispatch_events(2 * LONG_S)
    assert waits[0] == 1.0
    assert 0 < waits[1] <= 300.0


def test_a_worker_that_stops_answers_its_suspended_requests_at_once(
    worker: Worker, application: Application, connect: Callable[[], Client]
) -> None:
    client, late = connect(), connect()
    suspend(worker, [client])
    worker.alive = False
    worker._expire_at = 0.0
    turn(worker, lambda: b"Connection: close" in client.answer())
    late.ask()
    turn(worker, lambda: b"Connection: close" in late.answer())


def test_a_client_that_leaves_frees_its_place_at_once_and_costs_no_second_call(
    worker: Worker, application: Application, connect: Callable[[], Client]
) -> None:
    leaves, stays = connect(), connect()
    suspend(worker, [leaves, stays])
    leaves.sock.close()
    turn(worker, lambda: application.left)
    assert application.left == [application.found[0]]
    assert (worker.nr_conns, len(worker._suspended), application.over) == (1, 1, [])
    application.found[0].resume()
    application.found[1].resume()
    turn(worker, lambda: stays.answer().endswith(b"hello"))
    assert application.over == ["/wait"]


@pytest.mark.parametrize("is_late", [False, True])
def test_the_next_request_of_the_connection_is_answered_after_a_suspended_one(
    worker: Worker, application: Application, connect: Callable[[], Client], is_late: bool
) -> None:
    following = b"POST /next HTTP/1.1\r\nHost: a\r\nX-API-Key: k\r\nContent-Length: 4\r\n\r\nnext"
    client = connect()
    suspend(worker, [client], more=b"" if is_late else following)
    if is_late:
        client.sock.sendall(following)
        turn(worker, lambda: application.found[0].data.endswith(b"next"))
        assert client.answer() == b""
    application.found[0].resume()
    turn(worker, lambda: worker.keepalived_conns)
    read = client.answer()
    assert read.count(b"HTTP/1.1 200") == 2
    assert read.index(b"hello") < read.index(b"next")


def test_a_client_that_wants_its_connection_closed_gets_its_answer(
    worker: Worker, application: Application, connect: Callable[[], Client]
) -> None:
    client = connect()
    suspend(worker, [client], head=b"Connection: close\r\n")
    application.found[0].resume()
    turn(worker, lambda: client.answer().endswith(b"hello"))


def test_few_resumed_requests_are_in_threads_at_once_and_those_with_news_come_first(
    worker: Worker, application: Application, connect: Callable[[], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gunicorn_worker, "_RESUMED_AT_ONCE", 0)
    clients = [connect() for _ in range(4)]
    for number, client in enumerate(clients):
        client.ask(f"/wait/{number}")
    turn(worker, lambda: len(worker._suspended) == 4)
    for request in sorted(worker._suspended, key=lambda request: request.data)[:3]:
        worker._resume(request)
    application.found[3].resume()
    turn(worker, lambda: not worker._suspended)
    assert (application.over, worker._resumed) == ([], 0)
    monkeypatch.setattr(gunicorn_worker, "_RESUMED_AT_ONCE", 1)
    worker._start_resumed()
    assert worker._resumed == 1
    turn(worker, lambda: len(application.over) == 4)
    assert application.over == ["/wait/3", "/wait/0", "/wait/1", "/wait/2"]


@pytest.mark.parametrize(
    "options", [{"body": b"a" * 20_000}, {"body": b""}, {"head": b"Expect: 100-continue\r\n"}], ids=str
)
def test_a_request_that_the_event_loop_does_not_hold_whole_cannot_be_suspended(
    worker: Worker, application: Application, connect: Callable[[], Client], options: dict[str, bytes]
) -> None:
    client = connect()
    client.ask(**options)
    turn(worker, lambda: b"HTTP/1.1 200" in client.answer() or application.found)
    assert application.found == []


def test_holds_that_begin_together_end_one_after_another_in_the_second_half_of_their_time() -> None:
    ends = Ends()
    together = [ends.take(100.0, 30.0) for _ in range(3000)]
    times = sorted(end for end, _ in together)
    assert times[0] > 115 - 0.1 and times[-1] == 130.0
    slots = Counter(slot for _, slot in together)
    assert (len(slots), set(slots.values())) == (150, {20}), "15 s have 150 slots of 0.1 s"
    assert ends.take(102.0, 30.0)[0] == 132.0, "a later one has a slot of its own"


def test_a_slot_whose_holds_are_over_is_free_again() -> None:
    ends = Ends()
    _, slot = ends.take(100.0, 30.0)
    assert ends.take(100.0, 30.0)[1] < slot
    ends.free(slot)
    assert ends.take(100.0, 30.0) == (130.0, slot)


def test_suspended_requests_leave_no_end_behind(
    worker: Worker, application: Application, connect: Callable[[], Client]
) -> None:
    suspend(worker, [connect(), connect()])
    assert worker._ends._ending.total() == 2
    for suspension in application.found:
        suspension.resume()
    turn(worker, lambda: len(application.over) == 2)
    assert not worker._ends._ending
