"""A pool with few threads that compute, and with more where calls wait.

A thread that computes needs Python's global lock again after each of its system calls. With a thread for each of 32
reads at a time, one read took some 30 switches between threads, and with four threads some 5.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

COMPUTING = 4
"""Most threads that compute. They take the calls in their order."""
WAITS_S = 0.01
"""A call that takes longer is taken to wait for a client, a store or a result. Its thread does not count."""


class ThreadPool:
    """Runs calls in at most `most` threads. While it is behind, its owner has to call `relieve` every WAITS_S."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls = SimpleQueue[Callable[[], None] | None]()
        self._lock = threading.Lock()
        self._threads = set[threading.Thread]()
        # Threads that have a call, the oldest call first, and those of them that wait.
        self._began: dict[threading.Thread, float] = {}
        self._waiting = set[threading.Thread]()

    @property
    def is_behind(self) -> bool:
        """True if a call has no thread yet."""
        return not self._calls.empty()

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Runs a call once it has a thread."""
        future = Future[Any]()
        self._calls.put(lambda: _finish(future, call, args))
        with self._lock:
            self._start(COMPUTING - len(self._threads))
        return future

    def relieve(self) -> None:
        """Starts threads for the calls that have none, if the others wait: as many as wait, so that many calls that
        wait take few rounds."""
        with self._lock:
            until = time.monotonic() - WAITS_S
            for thread in [thread for thread, began in self._began.items() if began <= until]:
                del self._began[thread]
                self._waiting.add(thread)
            if self._computing < COMPUTING:
                self._start(max(COMPUTING, len(self._waiting)) - self._computing)

    def shutdown(self, wait: bool = True) -> None:
        """Ends the threads after their calls."""
        with self._lock:
            threads = list(self._threads)
        for _ in threads:
            self._calls.put(None)
        for thread in threads if wait else ():
            thread.join()

    @property
    def _computing(self) -> int:
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
                if ends := self._computing > COMPUTING:
                    self._threads.discard(me)


def _finish(future: Future[Any], call: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        result = call(*args)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
