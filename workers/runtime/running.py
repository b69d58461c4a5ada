"""A worker that is put together, and the end of its process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, Protocol

from app.domain.results import Result
from workers.health.presence import Presence
from workers.health.pulse import Pulse
from workers.sweeper import Sweeper

log = logging.getLogger(__name__)
_STOP_S = 20.0


class Handler(Protocol):
    def handle(self, request_id: str, model_id: str, kind: str) -> Result | None: ...


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a task needs, and what ends with the worker.

    `shared` handles doorbells of `queue`, which all workers of the kind read; `handler` those for this one alone.
    """

    handler: Handler
    shared: Handler
    queue: str
    presence: Presence
    pulse: Pulse
    sweeper: Sweeper
    tidy: Callable[[], None]
    close: Callable[[], None]
    leave: Callable[[], None] = lambda: None
    """Told, as soon as the worker is asked to end, that what runs is the last. May be called from a signal handler."""

    def handle(self, request_id: str, model_id: str, kind: str, queue: str = "") -> Result | None:
        handler = self.shared if queue == self.queue else self.handler
        with self.pulse.working():
            return handler.handle(request_id, model_id, kind)

    def tick(self) -> None:
        self.tidy()
        self.pulse.answered()

    def announce(self) -> None:
        self.presence.start()
        self.pulse.start()
        self.sweeper.start()

    def stop(self) -> None:
        """The running task has ended, and no other begins."""
        with end_in_any_case():
            self.pulse.stop()
            self.sweeper.stop()
            self.presence.stop()
            self.close()


@contextmanager
def end_in_any_case() -> Iterator[None]:
    """Ends the process if the block hangs, as it may on a rank or a server that is gone."""
    late = threading.Timer(_STOP_S, exit_process, [f"it did not stop within {_STOP_S:.0f} s"])
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def exit_process(why: str) -> NoReturn:
    """With a status that says it was not asked for, so that whoever looks after this process starts it again."""
    log.error("ending, to be started again: %s", why)
    logging.shutdown()
    os._exit(1)
