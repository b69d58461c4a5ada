"""The watchdog: this worker exits when its own heartbeat task is not consumed in time.

An idle sampler also samples a token now and then, as proof that its engine works.

A Celery worker can be alive and deaf: its consumer lost the broker and did not notice, or its task thread hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from app.dispatch import TickSender
from app.domain.sampling import SampleRequest
from workers.backends.sampling.base import SamplerBackend

_AWAY_S = 1.0

_ONE_TOKEN = SampleRequest(np.zeros(1, np.int32), num_samples=1, max_tokens=1, seed=0, temperature=0.0)


class Watchdog:
    """The watchdog. `answered` is called when a tick is done; `working` surrounds all other work.

    A worker that does something, or whose broker is away, is not deaf. A worker that is deaf for two `healthy_s`, or
    whose engine is not `engine_healthy`, ends: `end(why)` must not return. One tick is under way at a time; a lost tick
    is dispatched again."""

    def __init__(
        self, ticks: TickSender, engine_healthy: Callable[[], bool], healthy_s: float, end: Callable[[str], object]
    ) -> None:
        self._ticks, self._engine_healthy, self._healthy_s, self._end = ticks, engine_healthy, healthy_s, end
        self._lock = threading.Lock()
        self._running = 0
        self._alive = self._checked_at = time.monotonic()
        self._unanswered: float | None = None
        self._tick_sent_at: float | None = None
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._loop, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    @contextmanager
    def working(self) -> Iterator[None]:
        with self._lock:
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                self._alive = time.monotonic()

    def answered(self) -> None:
        self._alive = time.monotonic()
        self._tick_sent_at = None

    @property
    def busy(self) -> bool:
        return self._running > 0

    def healthy(self) -> bool:
        """True if the engine is sound and the worker is not deaf. May be called from any thread, and never waits."""
        return self._engine_healthy() and self.deaf_s() <= self._healthy_s

    def deaf_s(self) -> float:
        asked = self._unanswered
        if self._running or (asked is not None and time.monotonic() - asked > _AWAY_S):
            return 0.0
        return time.monotonic() - self._alive

    def check(self) -> None:
        """Runs one round of the watchdog."""
        now = time.monotonic()
        if now - self._checked_at > self._healthy_s / 2:
            self._alive = now  # this thread was stopped too, or waited for the broker
        self._checked_at = now
        if not self._engine_healthy():
            self._end("the engine has failed")
        elif self.deaf_s() > 2 * self._healthy_s:
            self._end(f"nothing was done for {self.deaf_s():.0f} s, although tasks were dispatched to this worker")
        else:
            self._send_tick_if_due(now)

    def _send_tick_if_due(self, now: float) -> None:
        self._unanswered = self._unanswered or now
        if not self._reaches_broker(now):
            return
        if now - self._unanswered > _AWAY_S:
            self._alive = time.monotonic()
        self._unanswered = None

    def _reaches_broker(self, now: float) -> bool:
        waiting = self._ticks.waiting()
        if waiting is None:
            return False
        lost = self._tick_sent_at is not None and now - self._tick_sent_at > self._healthy_s / 2
        if self._tick_sent_at is None or (lost and waiting == 0):
            self._tick_sent_at = None
            if not self._ticks.send():
                return False
            self._tick_sent_at = now
        return True

    def _loop(self) -> None:
        while not self._stop.wait(self._healthy_s / 10):
            self.check()


class Probe:
    """Samples one token now and then, while no request runs. A token behind a full batch would show nothing, and an
    engine that died reports it itself."""

    def __init__(self, backend: SamplerBackend, watchdog: Watchdog, every_s: float) -> None:
        self._backend, self._watchdog, self._every_s = backend, watchdog, every_s
        self._last = time.monotonic()

    def __call__(self) -> None:
        if not self._watchdog.busy and time.monotonic() - self._last > self._every_s:
            self._backend.sample(None, _ONE_TOKEN)
            self._last = time.monotonic()
