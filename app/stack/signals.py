"""Handlers of the signals that stop a stack: one sets a flag, the other raises KeyboardInterrupt."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

_TICK_S = 0.02


class StopFlag:
    """A flag that a signal handler may set.

    It takes no lock. A handler that sets a `threading.Event` may wait forever: it runs in the main thread, which may
    hold the event's lock at that moment in a `wait` or `set` of its own.
    """

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout_s: float) -> bool:
        """Returns soon after the flag is set (True), or after the timeout (False)."""
        deadline = time.monotonic() + timeout_s
        while not self._set and (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(left_s, _TICK_S))
        return self._set


@contextmanager
def stop_signals(*numbers: int) -> Iterator[StopFlag]:
    """A flag that any of these signals sets."""
    stopping = StopFlag()
    with _handled(numbers, lambda *_: stopping.set()):
        yield stopping


@contextmanager
def interrupted_by(*numbers: int) -> Iterator[None]:
    """Any of these signals raises KeyboardInterrupt in the block, as Ctrl-C does in most programs."""
    with _handled(numbers, signal.default_int_handler):
        yield


@contextmanager
def _handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """SIGHUP that is ignored stays so: `nohup` outlives the terminal."""
    before = {number: signal.getsignal(number) for number in numbers}
    if before.get(signal.SIGHUP) == signal.SIG_IGN:
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
