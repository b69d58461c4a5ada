"""The event loop of the API's worker: which requests get a thread, and which connections are closed."""

from __future__ import annotations

import logging
import math
import selectors
import signal
import socket
import threading
from collections.abc import Iterator

import pytest
from flask import Flask, request
from gunicorn.config import Config
from gunicorn.glogging import Logger
from gunicorn.workers.gthread import TConn, ThreadWorker

from app import gunicorn_worker, thread_pool
from app.api import errors
from app.api.base import WholeRequest
from app.errors import RequestTimeout
from app.gunicorn_worker import Arrival, TimedUnreader, Worker
from app.thread_pool import MOST_BUSY, Sender, ThreadPool

HEAD = b"POST / HTTP/1.1\r\nHost: a\r\n"
KEY, SMALL, LARGE = b"X-API-Key: k\r\n", b"Content-Length: 5\r\n", b"Content-Length: 99999999\r\n"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(60)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def worker() -> Worker:
    made = Worker(1, 1, [], None, 30, Config(), logging.getLogger())
    made.poller, made.tpool, made.nr_conns = selectors.DefaultSelector(), made.get_thread_pool(), 1
    return made


def test_a_worker_that_stops_refuses_new_connections_and_a_full_one_lets_them_wait(worker: Worker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        worker.sockets = [listener]
        worker.set_accept_enabled(True)
        worker.set_accept_enabled(False)
        socket.create_connection(address).close()
        worker.alive = False
        worker.set_accept_enabled(False)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)


@pytest.mark.parametrize(
    ("sent", "whole"),
    [
        (HEAD, False),
        (HEAD + b"\r\n", True),
        (HEAD + KEY + SMALL + b"\r\n1234", False),
        (HEAD + KEY + SMALL + b"\r\n12345", True),
        (HEAD + b"authorization: Bearer k\r\n" + SMALL + b"\r\n1234", False),
        (HEAD + SMALL + b"\r\n", True),
        (HEAD + KEY + LARGE + b"\r\n", True),
        (HEAD + KEY + SMALL + b"Expect: 100-continue\r\n\r\n", True),
    ],
)
def test_a_thread_gets_a_request_with_its_small_body_unless_no_credential_comes_with_it(
    pair: tuple[socket.socket, socket.socket], sent: bytes, whole: bool
) -> None:
    assert Arrival(TConn(Config(), pair[0], ("1.2.3.4", 5), None), 0.0, sent).is_whole is whole


def test_a_request_that_comes_byte_by_byte_is_whole_at_its_last_byte(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    arrival = Arrival(TConn(Config(), pair[0], ("1.2.3.4", 5), None), 0.0)
    request = HEAD + KEY + SMALL + b"\r\n12345"
    for index in range(len(request)):
        assert not arrival.is_whole
        arrival.add(request[index : index + 1])
    assert arrival.is_whole


def test_a_request_that_has_arrived_gets_a_thread_at_once_also_from_a_worker_that_stops(
    worker: Worker, pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[TConn] = []
    monkeypatch.setattr(ThreadWorker, "enqueue_req", lambda self, conn: given.append(conn))
    conn = TConn(Config(), pair[0], ("1.2.3.4", 5), None)
    worker.alive = False
    pair[1].sendall(HEAD + b"\r\n")
    worker.enqueue_req(conn)
    worker.murder_pending()
    assert (given, worker.nr_conns) == ([conn], 1)


@pytest.mark.parametrize("more", [b"", HEAD + b"\r\n"])
def test_the_event_loop_waits_for_no_request_that_is_there_already(
    worker: Worker, pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, more: bytes
) -> None:
    given: list[TConn] = []
    monkeypatch.setattr(ThreadWorker, "enqueue_req", lambda self, conn: given.append(conn))
    monkeypatch.setattr(worker.poller, "register", lambda *_: pytest.fail("it waits"))
    conn = TConn(Config(), pair[0], ("1.2.3.4", 5), None)
    pair[1].sendall(HEAD + KEY + SMALL + b"\r\n12345" + more)
    worker.enqueue_req(conn)
    assert next(conn.parser).body.read() == b"12345"
    if more:
        worker.enqueue_req(conn)
    assert given == [conn] * (2 if more else 1)


def test_a_header_that_is_too_long_is_refused_also_behind_a_request_of_its_connection(
    worker: Worker, pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[TConn] = []
    monkeypatch.setattr(ThreadWorker, "enqueue_req", lambda self, conn: given.append(conn))
    conn = TConn(Config(), pair[0], ("1.2.3.4", 5), None)
    pair[1].sendall(HEAD + KEY + SMALL + b"\r\n12345" + HEAD + b"Long: " + b"a" * 2**16 + b"\r\n\r\n")
    worker.enqueue_req(conn)
    assert next(conn.parser).body.read() == b"12345"
    worker.enqueue_req(conn)
    assert (given, worker.nr_conns) == ([conn], 0)


def test_requests_that_wait_in_their_threads_hold_up_no_other(worker: Worker) -> None:
    worker.tpool, answer = ThreadPool(MOST_BUSY + 1), threading.Event()
    for _ in range(MOST_BUSY):
        worker.tpool.submit(answer.wait)
    quick = worker.tpool.submit(divmod, 7, 2)
    for _ in range(1000):
        if worker.tpool.is_behind:
            worker.wait_for_and_dispatch_events(3600)
            worker.murder_pending()
    assert quick.result(60) == (3, 1)
    answer.set()
    worker.tpool.shutdown()


def test_a_connection_that_its_client_closes_between_two_requests_is_closed(
    worker: Worker, pair: tuple[socket.socket, socket.socket]
) -> None:
    pair[1].close()
    worker.enqueue_req(TConn(Config(), pair[0], ("1.2.3.4", 5), None))
    worker.wait_for_and_dispatch_events(60)
    assert worker.nr_conns == 0


def test_a_worker_that_stops_still_waits_for_clients_to_read_their_last_response(
    worker: Worker, pair: tuple[socket.socket, socket.socket]
) -> None:
    unread = gunicorn_worker.Future[bool]()
    unread.set_result(False)
    worker.finish_request(TConn(Config(), pair[0], ("1.2.3.4", 5), None), unread)
    worker.alive = False
    worker.murder_pending()
    assert worker.nr_conns == 1


def test_a_connection_is_closed_when_its_request_takes_too_long_and_not_before(
    worker: Worker, pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.enqueue_req(TConn(Config(), pair[0], ("1.2.3.4", 5), None))
    worker.murder_pending()
    assert worker.nr_conns == 1
    monkeypatch.setattr(gunicorn_worker.time, "monotonic", lambda: float("inf"))
    worker.murder_pending()
    assert (worker.nr_conns, pair[1].recv(1)) == (0, b"")


def test_a_closed_connection_lingers_in_the_event_loop_until_its_client_closes_it(
    worker: Worker, pair: tuple[socket.socket, socket.socket]
) -> None:
    unread = gunicorn_worker.Future[bool]()
    unread.set_result(False)
    worker.finish_request(TConn(Config(), pair[0], ("1.2.3.4", 5), None), unread)
    assert (worker.nr_conns, pair[1].recv(1)) == (1, b"")
    pair[1].close()
    worker.wait_for_and_dispatch_events(60)
    assert worker.nr_conns == 0


def test_a_body_that_stalls_ends_and_one_that_keeps_its_rate_goes_on(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(gunicorn_worker.time, "monotonic", lambda: now[0])
    unreader = TimedUnreader(pair[0])
    unreader.start(b"")
    for _ in range(60):
        pair[1].sendall(b"a" * 65536)
        received = 0
        while received < 65536:
            received += len(unreader.chunk(65536 - received))
        now[0] += 1
    now[0] += 31
    with pytest.raises(
        RequestTimeout, match="too slowly: 3932160 bytes arrived so far, and after 30 s 64 KiB/s are needed"
    ):
        unreader.chunk()


@pytest.mark.parametrize("framing", [LARGE + b"\r\n", b"Transfer-Encoding: chunked\r\n\r\n9\r\n"])
def test_a_body_that_stalls_is_a_408_with_the_reason_and_one_line_in_the_log(
    worker: Worker,
    pair: tuple[socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    framing: bytes,
) -> None:
    monkeypatch.setattr(gunicorn_worker, "_BODY_S", 0.1)
    app = Flask(__name__)
    errors.register(app)
    app.post("/")(lambda: request.get_data())
    answer = _answer(worker, app, pair, HEAD + KEY + framing + b"abc", caplog)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"the request's body arrives too slowly: 0 bytes arrived so far" in answer
    assert [record.getMessage() for record in caplog.records] == ["a request's body arrived too slowly: 0 bytes"]


def test_a_body_whose_client_stops_before_its_end_is_a_400(
    worker: Worker, pair: tuple[socket.socket, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    class Application(Flask):
        request_class = WholeRequest

    app = Application(__name__)
    app.config["MAX_CONTENT_LENGTH"] = 10**9
    app.post("/")(lambda: request.get_data())
    sent = HEAD + KEY + LARGE + b"Connection: close\r\n\r\nabc"
    assert _answer(worker, app, pair, sent, caplog, is_last=True).startswith(b"HTTP/1.1 400 ")


def test_a_response_that_nobody_reads_is_one_line_in_the_log(
    worker: Worker,
    pair: tuple[socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(gunicorn_worker, "_SEND_S", 1)
    app = Flask(__name__)
    app.get("/")(lambda: b"a" * 2**24)
    _answer(worker, app, pair, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", caplog)
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("INFO", None)]
    assert "read nothing of its response" in caplog.text


def test_a_client_that_reads_slowly_keeps_its_connection_until_a_call_has_no_thread(
    worker: Worker, pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_pool, "_SLOW_S", 0.0)
    monkeypatch.setattr(thread_pool, "_SLOW_BYTES_S", math.inf)
    sender, begun, answer = Sender(pair[0], worker._sends), threading.Event(), threading.Event()
    worker.tpool = ThreadPool(1)
    with worker._sends.waiting(sender):
        worker.tpool.submit(lambda: begun.set() or answer.wait(60))
        assert begun.wait(60)
        worker.murder_pending()
        sender.sendall(b"a")
        worker.tpool.submit(divmod, 7, 2)
        worker.tpool.submit(divmod, 7, 2)
        worker._expire_at = 0.0
        worker.murder_pending()
        assert (pair[1].recv(1), pair[1].recv(1)) == (b"a", b"")
    answer.set()
    worker.tpool.shutdown()


def _answer(
    worker: Worker,
    app: Flask,
    pair: tuple[socket.socket, socket.socket],
    sent: bytes,
    caplog: pytest.LogCaptureFixture,
    is_last: bool = False,
) -> bytes:
    """The first bytes that the worker sends for a request which one of its threads handles. The client of the last
    request ends its side of the connection."""
    worker.wsgi, worker.log = app, Logger(Config())
    worker.log.error_log = logging.getLogger()
    conn = TConn(Config(), pair[0], ("1.2.3.4", 5), ("1.1.1.1", 80))
    given: list[TConn] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ThreadWorker, "enqueue_req", lambda self, conn: given.append(conn))
        pair[1].sendall(sent)
        if is_last:
            pair[1].shutdown(socket.SHUT_WR)
        worker.enqueue_req(conn)
    with caplog.at_level(logging.INFO):
        assert [worker.handle(each) for each in given] == [False]
    return pair[1].recv(2**16)


def test_above_the_cap_the_address_with_the_most_arrivals_loses_its_oldest(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gunicorn_worker, "ARRIVING", 3)
    pairs = [socket.socketpair() for _ in range(4)]
    worker.nr_conns = len(pairs)
    addresses = ["9.9.9.9", "1.1.1.1", "1.1.1.1", "2.2.2.2"]
    for (ours, _), address in zip(pairs, addresses, strict=True):
        worker.enqueue_req(TConn(Config(), ours, (address, 5), None))
    assert worker.nr_conns == 3
    assert [ours.fileno() < 0 for ours, _ in pairs] == [False, True, False, False]
    for both in pairs:
        for end in both:
            end.close()


def test_a_client_that_reads_nothing_of_its_response_gives_its_thread_back(
    worker: Worker, pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gunicorn_worker, "_SEND_S", 1)
    conn = TConn(Config(), pair[0], ("1.2.3.4", 5), None)
    worker.enqueue_req(conn)
    conn.sock.setblocking(True)  # as a thread uses it
    signal.alarm(60)
    with pytest.raises(BlockingIOError):
        conn.sock.sendall(b"a" * 2**24)
    signal.alarm(0)
