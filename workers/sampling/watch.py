"""What is seen of a sampling request while it runs, and what stops it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from app.errors import TinsmithError

Drawn = Callable[[int, Sequence[int], Sequence[float]], None]
"""Told of further tokens of sample i and their logprobs, in order, by the engine's thread: it must not block."""
Ended = Callable[[], None]
"""Told that one more sample has ended, by the engine's thread as well."""


class Aborted(TinsmithError):
    """The request was stopped because nobody wants its result any more."""


class Watch:
    """One request's. `drawn` is told of tokens as they come, and `ended` of samples that are whole; without them nobody
    looks on. `took`: the tokens it has taken of the engine, those of its prompt included. Safe from any thread."""

    def __init__(self, drawn: Drawn | None = None, ended: Ended | None = None) -> None:
        self.drawn, self.ended = drawn, ended
        self.took = 0
        self._lock = threading.Lock()
        self._aborted = False
        self._callbacks: list[Callable[[], object]] = []

    @property
    def aborted(self) -> bool:
        return self._aborted

    def abort(self) -> None:
        """Stop the request soon; again, or behind its end, changes nothing."""
        with self._lock:
            callbacks, self._callbacks, self._aborted = self._callbacks, [], True
        for callback in callbacks:
            callback()

    def on_abort(self, callback: Callable[[], object]) -> None:
        """Call it once, from the thread that aborts; at once if that has been."""
        with self._lock:
            if not self._aborted:
                self._callbacks.append(callback)
                return
        callback()
