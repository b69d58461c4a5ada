"""gunicorn's threaded worker, with an event loop that waits for requests and for results.

A thread only gets a request whose header has arrived, and its body too if it is small and comes with a credential.
Such a request takes no thread while the application has suspended it (app/suspension.py).

gunicorn's own worker gives a thread to every connection that sends one byte, and lingers in its accept loop for up to
2 s for each connection that it closes. So 1,210 idle sockets would take every thread.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import re
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

from gunicorn.http.unreader import SocketUnreader
from gunicorn.workers.gthread import TConn

from app.errors import RequestTimeout
from app.server.shared_listener import SharedListener
from app.suspension import SUSPENSION, Ends, Suspension
from app.thread_pool import WAITS_S, Sender, Sends, ThreadPool

log = logging.getLogger(__name__)
ARRIVING = 2048
"""Most connections whose request is still arriving. Above it, the address with the most of them loses its oldest."""
IDLE_A_THREAD = 3
"""Idle connections that are kept for each thread."""
ARRIVAL_S = 20.0
"""Time for a header and a small body to arrive."""
_HEAD_BYTES = 64 * 1024
_SMALL_BODY_BYTES = 64 * 1024
# A large body is read in a thread: it has this time, and more as long as it arrives at this rate.
_BODY_S = 30.0
_BODY_BYTES_PER_S = 64 * 1024
# A client that reads nothing of its response for this long loses its connection.
_SEND_S = 30
_LINGER_S = 2.0
# A body that the application did not read may still be on its way; its thread hardly waits for it.
_DRAIN_S = 0.1
_EXPIRE_EVERY_S = 0.5
# More resumed requests at once would only make other requests wait for Python's global lock.
_RESUMED_AT_ONCE = 8
# A larger request is not suspended: its bytes are kept until then.
_SUSPENDED_BYTES = 16 * 1024
Application = Callable[[dict[str, Any], Any], Iterable[bytes]]
_HEAD_END = b"\r\n\r\n"
_CREDENTIAL = re.compile(rb"\r\n(?:x-api-key|authorization|cookie):", re.IGNORECASE)
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,9})[ \t]*\r\n", re.IGNORECASE)
_EXPECT = re.compile(rb"\r\nexpect:", re.IGNORECASE)


class Arrival:
    """A connection in the event loop: one whose request is arriving, or, with `ends`, one that waits for its client to
    close it."""

    def __init__(self, conn: TConn, until: float, data: bytes = b"", *, ends: bool = False) -> None:
        self.conn, self.until, self.ends = conn, until, ends
        self.address = str(conn.client[0]) if isinstance(conn.client, tuple) else ""
        self.data = bytearray()
        self._head, self._whole = 0, 0  # the sizes of the header, and of all that is awaited; 0: not known yet
        self.add(data)

    def add(self, data: bytes) -> None:
        """Adds received bytes. The header is read once: clients may send it byte by byte."""
        searched = max(0, len(self.data) - len(_HEAD_END))
        self.data += data
        if not self._head and (end := self.data.find(_HEAD_END, searched)) >= 0:
            self._head = end + len(_HEAD_END)
            self._whole = self._head + _awaited(bytes(self.data[: end + 2]))

    @property
    def is_too_long(self) -> bool:
        return len(self.data) > _HEAD_BYTES and not 0 < self._head <= _HEAD_BYTES

    @property
    def can_suspend(self) -> bool:
        """True if the bytes are few, and are all of a request with a body."""
        return 0 < self._head < self._whole <= len(self.data) <= _SUSPENDED_BYTES

    @property
    def is_whole(self) -> bool:
        """True if a thread can read the request without waiting, or its body is large or unasked for."""
        return 0 < self._whole <= len(self.data)


def _awaited(head: bytes) -> int:
    """The bytes of the body that the event loop waits for. Nothing is kept for a client without a credential or a
    cookie, since it is refused anyway."""
    length = _LENGTH.search(head)
    if length is None or not _CREDENTIAL.search(head) or _EXPECT.search(head):
        return 0
    return int(length[1]) if int(length[1]) <= _SMALL_BODY_BYTES else 0


class TimedUnreader(SocketUnreader):  # type: ignore[misc]
    """Reads a request from its first bytes and then from the socket. Raises RequestTimeout once the body is too slow:
    an OSError would mean to the application that its client has gone."""

    _until: float | None = None
    _received = 0

    def start(self, data: bytes) -> None:
        """Begins with the bytes that have arrived. The body's time begins when a thread first reads from the socket."""
        self.unread(data)
        self._until, self._received = None, 0

    def chunk(self, size_hint: int | None = None) -> bytes:
        now = time.monotonic()
        if self._until is None:
            self._until = now + _BODY_S
        left = self._until - now
        if left <= 0:
            raise self._too_slow()
        before = self.sock.gettimeout()
        self.sock.settimeout(left if before is None else min(left, before))
        try:
            data: bytes = super().chunk(size_hint)
        except TimeoutError:
            if before is not None and before < left:
                raise
            raise self._too_slow() from None
        finally:
            self.sock.settimeout(before)
        self._until += len(data) / _BODY_BYTES_PER_S
        self._received += len(data)
        return data

    def _too_slow(self) -> RequestTimeout:
        log.info("a request's body arrived too slowly: %d bytes", self._received)
        return RequestTimeout(
            f"the request's body arrives too slowly: {self._received} bytes arrived so far, and after {_BODY_S:.0f} s "
            f"{_BODY_BYTES_PER_S // 1024} KiB/s are needed; send smaller parts, or use a faster connection"
        )


class Request(Suspension):
    """A request that a thread has or that is suspended, with its bytes and those that its client sent after it."""

    slot = 0

    def __init__(self, conn: TConn, data: bytes, on_resume: Callable[[Request], None]) -> None:
        super().__init__(on_resume)
        self.conn, self.data = conn, data


class _IsSuspended(Exception):
    """Ends a call of the application that suspended its request."""


class Worker(SharedListener):
    """The worker. All methods but `handle` and what it calls run in the event loop's thread."""

    wsgi: Application
    application: Any = None
    """The application once it is loaded, which `wsgi` wraps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_keepalived = IDLE_A_THREAD * self.cfg.threads
        self._arrivals: dict[str, dict[TConn, Arrival]] = {}
        self._requests: dict[socket.socket, Request] = {}
        self._suspended: set[Request] = set()
        # Also requests that were resumed earlier.
        self._deadlines: list[tuple[float, int, Request]] = []
        self._ends, self._sends = Ends(), Sends()
        self._woken, self._expired = deque[Request](), deque[Request]()
        self._resumed = 0
        self._expire_at = 0.0

    def load_wsgi(self) -> None:
        super().load_wsgi()
        self.application = self.wsgi
        self.wsgi = partial(self._call, self.application)

    def get_thread_pool(self) -> ThreadPool:
        return ThreadPool(self.cfg.threads)

    def enqueue_req(self, conn: TConn) -> None:
        """Waits for the next request of a new connection, or of an idle one that became readable. Most requests are
        there already: waiting for each would take four more system calls of the loop's thread."""
        if conn.parser is None:
            conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        early = conn.parser.unreader.take_buffered() if conn.parser else b""
        arrival = Arrival(conn, time.monotonic() + ARRIVAL_S, early)
        if not arrival.is_whole:
            with contextlib.suppress(OSError):  # the event loop notices a connection that has ended
                arrival.add(conn.sock.recv(_HEAD_BYTES, socket.MSG_DONTWAIT))
        if arrival.is_whole and not arrival.is_too_long:
            self._start(arrival)
        else:
            self._await(arrival)

    def finish_request(self, conn: TConn, fs: Future[Any]) -> None:
        """Suspends the request if the application says so. Else it keeps the connection for its next request, or closes
        it without making other connections wait."""
        request = self._requests.pop(conn.sock, None)
        if request is not None and request.is_suspended:
            self._suspend(request)
            return
        if request is not None and request.is_over:
            self._resumed -= 1
            self._start_resumed()
        if not fs.cancelled() and fs.exception() is None and fs.result():
            super().finish_request(conn, fs)
            return
        try:
            conn.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._close(conn)
        else:
            self._await(Arrival(conn, time.monotonic() + _LINGER_S, ends=True))

    def handle_request(self, req: Any, conn: TConn) -> bool:
        """Answers a request. A client that reads nothing of the answer loses its connection, with one line in the
        log."""
        try:
            return bool(super().handle_request(req, conn))
        except _IsSuspended:
            return True
        except BlockingIOError:
            log.info("closed the connection of a client that read nothing of its response for %d s", _SEND_S)
            return False

    def wait_for_and_dispatch_events(self, timeout: float) -> None:
        """Waits no longer than until the time of a suspended request is over, or the thread pool needs the loop."""
        if self._deadlines:
            timeout = min(timeout, max(0.0, self._deadlines[0][0] - time.monotonic()))
        if self.tpool.is_behind:
            timeout = min(timeout, WAITS_S)
        super().wait_for_and_dispatch_events(timeout)

    def murder_pending(self) -> None:
        """Ends what has waited for too long: for a thread, a result or a client. gunicorn calls it after each event."""
        if self.tpool.is_behind:
            self.tpool.start_more()
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            self._resume(heapq.heappop(self._deadlines)[2])
        if now >= self._expire_at:
            self._expire_at = now + _EXPIRE_EVERY_S
            self._expire(now)

    def _expire(self, now: float) -> None:
        """Closes the connections whose time is over. A stopping worker also closes those that have sent nothing, and
        resumes all requests. Where calls have no thread, clients that read slowly lose theirs."""
        for arrival in [arrival for arrivals in self._arrivals.values() for arrival in arrivals.values()]:
            if arrival.until <= now or not (self.alive or arrival.data or arrival.ends):
                self._drop(arrival)
        for request in () if self.alive else list(self._suspended):
            self._resume(request)
        if ended := self._sends.end_slowest(self.tpool.lacking):
            log.info("closed the connections of %d clients that read slowly: calls had no thread", ended)

    def _keepalive_after(self, conn: TConn, keepalive: bool) -> bool:
        with contextlib.suppress(RequestTimeout):
            return keepalive and bool(conn.parser.finish_body(deadline=time.monotonic() + _DRAIN_S))
        return False

    def _await(self, arrival: Arrival) -> None:
        if sum(map(len, self._arrivals.values())) >= ARRIVING:
            crowded = max(self._arrivals.values(), key=len)
            self._drop(next(iter(crowded.values())))
        self._arrivals.setdefault(arrival.address, {})[arrival.conn] = arrival
        arrival.conn.sock.setblocking(False)
        self.poller.register(arrival.conn.sock, selectors.EVENT_READ, partial(self._receive, arrival))
        self._start_if_whole(arrival)

    def _receive(self, arrival: Arrival, sock: socket.socket) -> None:
        if arrival.conn not in self._arrivals.get(arrival.address, {}):
            return  # dropped by an earlier event of the same round
        try:
            data = sock.recv(_HEAD_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(arrival)
        elif not arrival.ends:
            arrival.add(data)
            self._start_if_whole(arrival)

    def _start_if_whole(self, arrival: Arrival) -> None:
        """Gives the request to a thread once it is whole. Drops a connection with an endless header."""
        if arrival.is_too_long:
            self._drop(arrival)
        elif arrival.is_whole:
            self._forget(arrival)
            self._start(arrival)

    def _start(self, arrival: Arrival) -> None:
        conn, data = arrival.conn, bytes(arrival.data)
        conn.init()
        if not isinstance(conn.parser.unreader, TimedUnreader):
            conn.parser.unreader = TimedUnreader(conn.sock)
        if arrival.can_suspend:
            self._requests[conn.sock] = Request(conn, data, partial(self.method_queue.defer, self._resume))
        conn.parser.unreader.start(data)
        super().enqueue_req(conn)

    def _call(self, application: Application, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Calls the application. Its answer does not count if it suspended the request."""
        response = start_response.__self__  # gunicorn's, which knows the socket only to send
        response.sock = Sender(response.sock, self._sends)
        request = self._requests.get(environ["gunicorn.socket"])
        if request is None:
            return application(environ, start_response)
        environ[SUSPENSION] = request
        answer = application(environ, start_response)
        if not request.is_suspended:
            return answer
        if hasattr(answer, "close"):
            answer.close()
        raise _IsSuspended

    def _suspend(self, request: Request) -> None:
        """Puts the parser back to before the request, and listens to the client."""
        request.conn.parser.mesg = None  # else it would end here if the client wants the connection closed
        request.conn.parser.unreader.take_buffered()  # `request.data` has it
        ends, request.slot = self._ends.take(time.monotonic(), request.seconds)
        heapq.heappush(self._deadlines, (ends, id(request), request))
        self._suspended.add(request)
        request.conn.sock.setblocking(False)
        self.poller.register(request.conn.sock, selectors.EVENT_READ, partial(self._hear, request))
        if request.is_resumed or not self.alive:
            self._resume(request)

    def _hear(self, request: Request, sock: socket.socket) -> None:
        """Keeps what the client of a suspended request sends, or forgets the request if the client has gone."""
        if request not in self._suspended:
            return  # resumed by an earlier event of the same round
        try:
            data = sock.recv(_SUSPENDED_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            request.data += data
            self.poller.unregister(sock)  # it would have to keep any amount
        else:
            self._end_suspension(request)
            self._close(request.conn)

    def _resume(self, request: Request) -> None:
        if request in self._suspended:
            self._end_suspension(request)
            (self._woken if request.is_resumed else self._expired).append(request)
            self._start_resumed()

    def _end_suspension(self, request: Request) -> None:
        self._suspended.discard(request)
        self._ends.free(request.slot)
        self._unregister(request.conn)
        request.end()

    def _start_resumed(self) -> None:
        """Gives resumed requests to threads again, first those for which there is news."""
        while self._resumed < _RESUMED_AT_ONCE and (self._woken or self._expired):
            request = (self._woken or self._expired).popleft()
            self._resumed += 1
            self._requests[request.conn.sock] = request
            request.conn.parser.unreader.start(request.data)
            super().enqueue_req(request.conn)

    def _drop(self, arrival: Arrival) -> None:
        self._forget(arrival)
        self._close(arrival.conn)

    def _forget(self, arrival: Arrival) -> None:
        del self._arrivals[arrival.address][arrival.conn]
        if not self._arrivals[arrival.address]:
            del self._arrivals[arrival.address]
        self._unregister(arrival.conn)

    def _unregister(self, conn: TConn) -> None:
        with contextlib.suppress(OSError, KeyError, ValueError):
            self.poller.unregister(conn.sock)

    def _close(self, conn: TConn) -> None:
        self.nr_conns -= 1
        conn.close()
