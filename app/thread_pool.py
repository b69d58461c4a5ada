"""A pool with few busy threads, and with more where calls wait; and the means to take threads back from slow clients.

A thread that computes needs Python's global lock again after each of its system calls. With a thread for each of 32
reads at a time, one read took some 30 switches between threads, and with four threads some 5.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

MOST_BUSY = 4
"""Most threads whose call has taken less than WAITS_S. They take the calls in their order."""
WAITS_S = 0.01
"""A call that takes longer is taken to wait for a client, a store or a result."""
# A client is slow that reads fewer bytes a second. For one second, a fast one may also wait for its own network.
_SLOW_BYTES_S, _SLOW_S = 256 * 1024, 1.0
# A waiting response counts what it has sent after each piece.
_PIECE_BYTES = 64 * 1024


class ThreadPool:
    """Runs calls in at most `most` threads. While it is behind, its owner has to call `start_more` every WAITS_S."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls = SimpleQueue[Callable[[], None] | None]()
        self._lock = threading.RLock()  # a signal handler of gunicorn calls `shutdown` between any two steps
        self._threads = set[threading.Thread]()
        # When each call began that is not taken to wait yet.
        self._began: dict[threading.Thread, float] = {}
        # Threads whose call has taken longer than WAITS_S.
        self._waiting = set[threading.Thread]()

    @property
    def is_behind(self) -> bool:
        """True if a call has no thread yet."""
        return not self._calls.empty()

    @property
    def lacking(self) -> int:
        """The number of calls without a thread, once the pool can start no more threads."""
        return self._calls.qsize() if len(self._threads) >= self._most else 0

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Runs a call once it has a thread."""
        future = Future[Any]()
        self._calls.put(lambda: _finish(future, call, args))
        with self._lock:
            self._start(MOST_BUSY - len(self._threads))
        return future

    def start_more(self) -> None:
        """Takes calls older than WAITS_S as waiting. If fewer than MOST_BUSY threads are left for other calls, starts
        threads for calls that have none: as many as wait, so that each round about doubles the number."""
        with self._lock:
            until = time.monotonic() - WAITS_S
            for thread in [thread for thread, began in self._began.items() if began <= until]:
                del self._began[thread]
                self._waiting.add(thread)
            if self._busy < MOST_BUSY:
                self._start(max(MOST_BUSY, len(self._waiting)) - self._busy)

    def shutdown(self, wait: bool = True) -> None:
        """Ends the threads after their calls."""
        with self._lock:
            threads = list(self._threads)
        for _ in threads:
            self._calls.put(None)
        for thread in threads if wait else ():
            thread.join()

    @property
    def _busy(self) -> int:
        return len(self._threads) - len(self._waiting)

    def _start(self, count: int) -> None:
        for _ in range(min(count, self._calls.qsize(), self._most - len(self._threads))):
            thread = threading.Thread(target=self._run, name="request", daemon=True)
            thread.start()
            self._threads.add(thread)

    def _run(self) -> None:
        me, ends = threading.current_thread(), False
        while not ends and (call := self._calls.get()) is not None:
            with self._lock:
                self._began[me] = time.monotonic()
            call()
            del call  # it holds the connection
            with self._lock:
                self._began.pop(me, None)
                self._waiting.discard(me)
                if ends := self._busy > MOST_BUSY:
                    self._threads.discard(me)


class Sends:
    """The responses that wait for their clients to read, each in a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = set[Sender]()

    @contextlib.contextmanager
    def waiting(self, sender: Sender) -> Iterator[None]:
        """The time in which a response waits."""
        began = time.monotonic()
        with self._lock:
            sender.began = began
            self._waiting.add(sender)
        try:
            yield
        finally:
            with self._lock:
                self._waiting.discard(sender)
                sender.waited += time.monotonic() - began

    def end_slowest(self, most: int) -> int:
        """Closes up to `most` connections of slow readers that have waited for a second in all, first the slowest.
        Returns their number."""
        now = time.monotonic()
        with self._lock:  # a connection that waits is open: its thread closes it later
            slow = [sender for sender in self._waiting if sender.is_slow(now)]
            ended = sorted(slow, key=lambda sender: sender.sent / sender.seconds(now))[:most]
            for sender in ended:
                self._waiting.discard(sender)
                with contextlib.suppress(OSError):  # the client may have gone
                    sender.sock.shutdown(socket.SHUT_RDWR)
        return len(ended)


class Sender:
    """Sends a response in the place of its socket. Time without anything to send is not waiting."""

    def __init__(self, sock: socket.socket, sends: Sends) -> None:
        self.sock, self._sends = sock, sends
        self.sent = 0
        self.waited = self.began = 0.0

    def seconds(self, now: float) -> float:
        """The time for which the response, which waits now, has waited in all."""
        return self.waited + now - self.began

    def is_slow(self, now: float) -> bool:
        """True if its client reads slowly; it has to wait now."""
        seconds = self.seconds(now)
        return seconds >= _SLOW_S and self.sent < _SLOW_BYTES_S * seconds

    def sendall(self, data: bytes) -> None:
        left = memoryview(data)
        with contextlib.suppress(BlockingIOError):
            left = self._after(left, self.sock.send(left, socket.MSG_DONTWAIT))
        if left:
            with self._sends.waiting(self):
                while left:
                    left = self._after(left, self.sock.send(left[:_PIECE_BYTES]))

    def _after(self, data: memoryview, sent: int) -> memoryview:
        self.sent += sent
        return data[sent:]


def _finish(future: Future[Any], call: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        result = call(*args)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
