"""A coalescing worker: a thread that works on the newest item of every key and retries failed work."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import redis

from app.errors import TinsmithError

log = logging.getLogger(__name__)
_EXPECTED = (TinsmithError, OSError, redis.RedisError)
# After an item that took t seconds its key rests for 9 t, so no key takes more than a tenth of the thread's time.
_REST = 9.0

Item = TypeVar("Item")


class CoalescingWorker(Generic[Item]):
    """A coalescing worker. `work(key, item)` runs in one thread, one item at a time; a newer item replaces a waiting
    one.

    Work that raised is retried after `retry_s`, unless a newer item came. Nothing is kept beyond the process.
    """

    def __init__(self, name: str, work: Callable[[str, Item], None], retry_s: float = 5.0) -> None:
        self._name, self._work, self._retry_s = name, work, retry_s
        self._changed = threading.Condition()
        self._waiting: dict[str, Item] = {}
        self._urgent: set[str] = set()
        self._rests: dict[str, float] = {}
        self._current: tuple[str, Item] | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def put(self, key: str, item: Item, *, at_once: bool = False) -> None:
        """Puts the newest item of `key`. With `at_once` it does not wait until the key has rested."""
        with self._changed:
            self._waiting[key] = item
            if at_once:
                self._urgent.add(key)
            self._changed.notify_all()

    def ready(self, key: str) -> bool:
        """True if no item of `key` waits or is in work, and the key has rested."""
        with self._changed:
            rested = self._rests.get(key, 0.0) <= time.monotonic()
            return rested and key not in self._waiting and not self._busy_with(key)

    def item(self, key: str) -> Item | None:
        """The item of `key` that is in work right now."""
        with self._changed:
            return self._current[1] if self._current is not None and self._current[0] == key else None

    def finish(self, key: str, timeout_s: float) -> None:
        """Works on the waiting item of `key` now. Returns when it is done or has failed once more, or after
        `timeout_s`."""
        with self._changed:
            if key in self._waiting:
                self._urgent.add(key)
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._stopped or not self._is_urgent(key), timeout_s)

    def drop(self, key: str) -> None:
        """Drops the waiting item of `key`. An item in work continues."""
        with self._changed:
            self._waiting.pop(key, None)
            self._rests.pop(key, None)
            self._urgent.discard(key)
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Ends the thread after its current item, waiting at most `timeout_s`; waiting items are dropped."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _is_urgent(self, key: str) -> bool:
        return self._busy_with(key) or key in self._urgent

    def _busy_with(self, key: str) -> bool:
        return self._current is not None and self._current[0] == key

    def _loop(self) -> None:
        while (job := self._take()) is not None:
            started = time.monotonic()
            done = self._try(*job)
            ended = time.monotonic()
            self._finish_item(*job, done, ended + (_REST * (ended - started) if done else self._retry_s))

    def _take(self) -> tuple[str, Item] | None:
        """Waits for the next due item and returns it; None when the thread is to end."""
        with self._changed:
            while not self._stopped:
                now = time.monotonic()
                self._rests = {key: until for key, until in self._rests.items() if until > now}
                due = next((key for key in self._waiting if key in self._urgent or key not in self._rests), None)
                if due is not None:
                    self._urgent.discard(due)
                    self._current = (due, self._waiting.pop(due))
                    return self._current
                self._changed.wait(min((self._rests[key] - now for key in self._waiting), default=None))
            return None

    def _try(self, key: str, item: Item) -> bool:
        try:
            self._work(key, item)
        except Exception as error:
            # The thread must survive every exception of its work.
            known = isinstance(error, _EXPECTED)
            text = f"{self._name} failed and is tried again in {self._retry_s:.0f} s: {type(error).__name__}: {error}"
            log.warning(text, exc_info=not known, extra={"model_id": key})
            return False
        return True

    def _finish_item(self, key: str, item: Item, done: bool, rest_until: float) -> None:
        with self._changed:
            if not done:
                self._waiting.setdefault(key, item)
            self._rests[key] = rest_until
            self._current = None
            self._changed.notify_all()


MakeWorker = Callable[..., CoalescingWorker[Any]]
"""Starts a coalescing worker from its name and its work. Tests pass one with another `retry_s`."""
