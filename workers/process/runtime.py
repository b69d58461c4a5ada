"""The worker of this process as it runs: what its Celery tasks call, the tasks themselves, and the end of the process.

There is one task name for each kind of future. The task's id is the request id, and no payload is sent along. Celery
sends no events of these tasks, because one may run several futures or none: workers/process/telemetry.py sends those of
the futures.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, Protocol

import redis
from celery import Task, shared_task

from app.dispatch import KINDS, TICK, task_name
from app.domain.results import Result
from app.errors import Requeue
from workers.maintenance.leader import MaintenanceRunner
from workers.process import telemetry
from workers.process.liveness import Heartbeat, Watchdog

log = logging.getLogger(__name__)
_STOP_S = 20.0


class Handler(Protocol):
    def handle(self, request_id: str, model_id: str, kind: str) -> Result | None:
        """Handles one dispatch. Returns the future's result; None when the future no longer exists. Raises Requeue when
        it must be dispatched again."""
        ...


@dataclass(frozen=True, slots=True)
class Runtime:
    """The assembled worker: everything a task needs, and everything that ends with the worker.

    `shared` handles dispatches of `queue`, which all workers of the role read; `handler` handles dispatches for this
    worker alone.
    """

    handler: Handler
    shared: Handler
    queue: str
    heartbeat: Heartbeat
    watchdog: Watchdog
    maintenance: MaintenanceRunner
    on_tick: Callable[[], None]
    close: Callable[[], None]
    leave: Callable[[], None] = lambda: None
    """Called from a thread as soon as the worker is asked to end: the running task is the last one."""
    hand_back: Callable[[], None] = lambda: None
    """Called from a thread when the running task takes too long for an orderly stop, perhaps twice; the process then
    ends. Raises RedisError while the state server is away."""

    def handle(self, request_id: str, model_id: str, kind: str, queue: str) -> Result | None:
        """Handles one dispatch of `queue`, as Handler does. The worker is not deaf meanwhile."""
        handler = self.shared if queue == self.queue else self.handler
        with self.watchdog.working():
            return handler.handle(request_id, model_id, kind)

    def tick(self) -> None:
        """Handles a tick. While the state server is away there is nothing to do, which is one line in the log."""
        try:
            self.on_tick()
        except redis.RedisError as error:
            log.warning("a tick failed, because the state server is away: %s", error)
        self.watchdog.answered()

    def announce(self) -> None:
        """Starts the threads. The API and other workers know of this one from the first heartbeat on."""
        self.heartbeat.start()
        self.watchdog.start()
        self.maintenance.start()

    def stop(self) -> None:
        """Ends the worker's parts. Called after the running task has ended; no other begins."""
        with exit_on_hang():
            self.watchdog.stop()
            self.maintenance.stop()
            self.heartbeat.stop()
            self.close()
            telemetry.close()


_current: Runtime | None = None


def become(runtime: Runtime) -> None:
    """Makes this the worker of the process."""
    global _current
    _current = runtime


def current() -> Runtime:
    """Returns the worker of this process. `become` has set it before Celery starts the first task."""
    assert _current is not None, "tasks run only after become()"
    return _current


@contextmanager
def exit_on_hang() -> Iterator[None]:
    """Ends the process if the block hangs, as it may on a rank or a server that is gone."""
    late = threading.Timer(_STOP_S, exit_process, [f"it did not stop within {_STOP_S:.0f} s"])
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def exit_process(why: str) -> NoReturn:
    """Ends the process with status 1: the end was not requested, so its supervisor starts it again."""
    log.error("this process ends, and its supervisor restarts it: %s", why)
    logging.shutdown()
    os._exit(1)


def _handle(task: Task, model_id: str) -> None:
    request_id = task.request.id
    queue = task.request.delivery_info["routing_key"]
    try:
        current().handle(request_id, model_id, task.name.rpartition(".")[2], queue)
    except Requeue as reason:
        # Whatever is missing dispatches the request again.
        log.debug("not now: %s", reason, extra={"request_id": request_id})
    except Exception:
        # The future is not terminal; the redispatch task dispatches the request again.
        log.exception("could not handle a future", extra={"request_id": request_id})


def _tick() -> None:
    current().tick()


shared_task(name=TICK, send_events=False)(_tick)
for _kind in KINDS:
    shared_task(bind=True, name=task_name(_kind), send_events=False)(_handle)
