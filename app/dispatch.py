"""Dispatch through Celery, and the task events of futures. The task id is the request id; the task has no payload.

Dispatch is best effort: the journal is the truth, so a lost, doubled or reordered message changes nothing. A future may
take several messages, and a message may run several futures. So the events that Flower shows are not those of Celery's
messages: the API and the workers send them for the future itself.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import redis
from celery import Celery
from celery.loaders.app import AppLoader
from kombu.exceptions import OperationalError

from app import broker, ids
from app.settings import Settings
from app.sockets import ANSWER_S, KEEPALIVE
from app.stores.redis.client import connect
from app.stores.redis.types import Holder

log = logging.getLogger(__name__)

# A consumed seq has no future of its own, but the calls that wait behind it must go on. The kind catch_up does that.
CATCH_UP = "catch_up"
KINDS = (
    *("create_model", "forward_backward", "forward", "optim_step", "save_weights", "load_weights", "sample"),
    CATCH_UP,
)
TICK = "tinsmith.tick"
_CONTROL_REPLY_S = 60
# Most events that wait while the broker hangs; further ones are lost.
_MOST_EVENTS = 10_000
_SENT_TOGETHER = 1000
# One message takes 2 ms of Python's lock, which the next call would wait for.
_SEND_EVERY_S = 0.2
_CLOSING_S = 2
_LONGEST_REASON = 200
# A broker that is down or full refuses a message within milliseconds. One that hangs fails it after 20 s.
_HANGS_S = 1.0
_REST_S = 2.0
# Of the 32 connections to the broker. kombu has no bound of its own on the wait for a connection.
_MOST_AT_ONCE = 24

Send = Callable[[str, str, str, str], None]
"""(kind, request id, model or sampling session id, queue): dispatches a call."""


def task_name(kind: str) -> str:
    """The name of the Celery task of a journalled kind."""
    return f"tinsmith.{kind if kind in KINDS else CATCH_UP}"


def train_queue(base_model: str, *, full: bool = False) -> str:
    """The queue of a base model's trainers, or with `full` of its trainers for full fine-tuning."""
    return f"{'full' if full else 'train'}.{base_model}"


def sample_queue(base_model: str, *, full: bool = False) -> str:
    """The queue of a base model's samplers, or with `full` of its samplers for fully fine-tuned models."""
    return f"{'fullsample' if full else 'sample'}.{base_model}"


class Work(NamedTuple):
    """The work that a queue brings: training, or with `samples` sampling. It is for fully fine-tuned models if
    `full`."""

    samples: bool
    full: bool
    base_model: str


def parse_queue(queue: str) -> Work | None:
    """The work of a queue that `train_queue` or `sample_queue` names; None for any other queue."""
    base_model = queue.partition(".")[2]
    for full in (False, True):
        if queue == train_queue(base_model, full=full):
            return Work(False, full, base_model)
        if queue == sample_queue(base_model, full=full):
            return Work(True, full, base_model)
    return None


def direct_queue(queue: str, node: str) -> str:
    """The queue that only one node reads, for the models it owns."""
    return f"{queue}@{node}"


def queue_for(queue: str, node: str | None) -> str:
    """The direct queue of the node that owns a model or sampler; `queue` without such a node."""
    return direct_queue(queue, node) if node else queue


class Loader(AppLoader):  # type: ignore[misc]
    """Celery's loader, which imports the modules of the tasks from the import path alone."""

    def import_from_cwd(self, module: str, imp: object = None, package: str | None = None) -> ModuleType:
        """Celery puts the current folder first on the import path meanwhile: a file of the user's would be loaded in
        the place of each module that ours import."""
        return import_module(module, package)


class App(Celery):  # type: ignore[misc]
    """Celery over a broker, whose whole URL is `redis_url`: redis-py's clients take the options in it."""

    def __init__(self, redis_url: str) -> None:
        super().__init__("tinsmith", broker=broker.kombu_url(redis_url), loader=Loader)
        self.redis_url = redis_url


def celery_app(settings: Settings) -> App:
    """The one Celery configuration, for the API that dispatches tasks and the workers that consume them."""
    broker.register()
    app = App(settings.broker_url)
    app.conf.update(
        broker_use_ssl=broker.tls(settings.broker_url),
        task_ignore_result=True,
        task_serializer="json",
        accept_content=["json"],
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_publish_retry=False,
        task_send_sent_event=True,
        task_create_missing_queues=True,
        worker_prefetch_multiplier=1,
        worker_send_task_events=True,
        worker_enable_remote_control=True,
        worker_hijack_root_logger=False,
        # Reply queues of Flower and `celery inspect` otherwise pile up for ever (celery issue 6089).
        control_queue_expires=_CONTROL_REPLY_S,
        control_queue_ttl=_CONTROL_REPLY_S,
        broker_connection_retry_on_startup=True,
        broker_pool_limit=32,
        broker_transport_options={
            "health_check_interval": 10,
            "socket_connect_timeout": 2,
            "socket_timeout": ANSWER_S,
            # Once more, on a new connection: a dispatch on one that fell silent would wait for the redispatch task.
            "retry_on_timeout": True,
            "socket_keepalive": True,
            "socket_keepalive_options": KEEPALIVE,
            # With kombu's defaults, a publish to a broker that is away takes 6 s, and every admission waits for it.
            "max_retries": 1,
            "interval_start": 0,
            "interval_step": 0,
            "interval_max": 0,
        },
    )
    return app


class TaskEvents:
    """Celery's task events of futures, as Flower reads them. A thread sends them, so that no call and no Op waits for
    the broker. Events that cannot be sent are lost.

    `node` is the worker that Flower shows beside a task; the API has none.
    """

    def __init__(self, celery: Celery, node: str | None = None) -> None:
        self._celery, self._node = celery, node
        self._waiting: queue.Queue[tuple[str, dict[str, Any]] | None] = queue.Queue(_MOST_EVENTS)
        self._thread = threading.Thread(target=self._run, name="task-events", daemon=True)
        self._starting, self._closing = threading.Lock(), threading.Event()
        self._warned = False

    def admitted(self, request_id: str, kind: str, project: str) -> None:
        """The future waits: PENDING in Flower."""
        if self._celery.conf.task_send_sent_event:
            self._put("task-sent", request_id, **_described(request_id, kind, project))

    def started(self, request_id: str, kind: str, project: str, attempts: int) -> None:
        """An attempt begins: STARTED. `attempts` is the number of earlier ones that broke their backend or ended with
        their worker. They send no RETRY themselves, so the next attempt does."""
        if attempts:
            self.retried(request_id, f"attempt {attempts} broke its backend or ended with its worker")
        described = _described(request_id, kind, project)
        self._put_own("task-received", request_id, **described, retries=attempts, eta=None, expires=None)
        self._put_own("task-started", request_id)

    def retried(self, request_id: str, why: str) -> None:
        """An attempt ended without a result, and another one follows: RETRY."""
        self._put_own("task-retried", request_id, exception=why[:_LONGEST_REASON], traceback="")

    def ended(self, request_id: str, *, failed: bool, took_s: float = 0.0) -> None:
        """The result can be read: SUCCESS or FAILURE. The reason of a failure is for the client alone."""
        if failed:
            self._put_own("task-failed", request_id, exception="the future failed: a poll returns why", traceback="")
        else:
            self._put_own("task-succeeded", request_id, result="", runtime=took_s)

    def revoked(self, request_id: str) -> None:
        """The future was cancelled, or its model or session has ended: REVOKED."""
        self._put_own("task-revoked", request_id, terminated=False, signum=None, expired=False)

    def close(self) -> None:
        """Sends the waiting events and ends the thread. Gives up when the broker hangs."""
        self._closing.set()
        if self._thread.is_alive():
            with suppress(queue.Full):
                self._waiting.put(None, timeout=_CLOSING_S)
                self._thread.join(_CLOSING_S)

    def _put_own(self, type_: str, request_id: str, **fields: Any) -> None:
        if self._celery.conf.worker_send_task_events:
            self._put(type_, request_id, **fields)

    def _put(self, type_: str, request_id: str, **fields: Any) -> None:
        with self._starting:
            if self._thread.ident is None:  # late, because the API's server forks its processes
                self._thread.start()
        try:
            self._waiting.put_nowait((type_, {"uuid": request_id, "timestamp": time.time(), **fields}))
        except queue.Full:
            log.debug("too many task events wait: one is lost")

    def _run(self) -> None:
        going_on = True
        while going_on:
            first = self._waiting.get()
            if first is not None:
                self._closing.wait(_SEND_EVERY_S)
            batch = [first, *itertools.islice(self._rest(), _SENT_TOGETHER)]
            going_on = None not in batch
            try:
                self._send([event for event in batch if event is not None])
            except (OperationalError, redis.RedisError, OSError) as error:
                log.debug("%d task events are lost: %s", len(batch), error)
            except Exception as error:  # the thread must live, else no later event is sent
                self._warn_once(error)

    def _warn_once(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning("task events are lost", exc_info=error)

    def _rest(self) -> Iterator[tuple[str, dict[str, Any]] | None]:
        while not self._waiting.empty():
            yield self._waiting.get()

    def _send(self, events: Sequence[tuple[str, dict[str, Any]]]) -> None:
        with self._celery.events.default_dispatcher(hostname=self._node) as dispatcher:
            dispatcher.buffer_group, dispatcher.buffer_limit = {"task"}, len(events) + 1  # one message for all of them
            for type_, fields in events:
                dispatcher.send(type_, **fields)
            dispatcher.flush()


def _described(request_id: str, kind: str, project: str) -> dict[str, str]:
    parent = "sampling_session_id" if kind == "sample" else "model_id"
    shown = {"project": project, parent: ids.parent_of(request_id)}
    return {"name": task_name(kind), "args": "()", "kwargs": repr(shown)}


class Dispatcher:
    """Dispatches futures that wait in the journal. `events` are those of futures that were admitted here.

    No method raises when the broker is away. Once a dispatch has failed on a hanging broker, one call in each `_REST_S`
    seconds tries it again, until one succeeds. The others return at once, and the redispatch task dispatches their
    futures later.
    """

    def __init__(self, celery: App) -> None:
        self._celery = celery
        self.events = TaskEvents(celery)
        self._free = threading.Semaphore(_MOST_AT_ONCE)
        self._lock = threading.Lock()
        self._rests_until = 0.0
        """Until then no call tries the broker, which hangs; 0 while it does not."""
        self._reached = 0.0
        """When a call last reached the broker."""

    def send(self, kind: str, request_id: str, parent_id: str, queue: str) -> None:
        """Dispatches one future. The redispatch task dispatches a future again whose message was lost.

        `parent_id` is the model or sampling session.
        """
        name, arguments = task_name(kind), {"model_id": parent_id}
        self._try(lambda: _publish(self._celery, request_id, name, arguments, queue), request_id, request_id=request_id)

    def wake(self, holder: Holder) -> None:
        """Makes a trainer check at once which models it may free.

        Sends nothing while a message waits for this trainer: it is busy, and its watchdog's next tick does the same.
        """
        queue = direct_queue(train_queue(holder.base_model, full=holder.full), holder.node)
        self._try(lambda: self._tick(queue), f"a tick to {queue}")

    @cached_property
    def _broker(self) -> redis.Redis:
        """Made late, because the API's server forks its processes."""
        return connect(self._celery.redis_url)

    def _tick(self, queue: str) -> None:
        if self._broker.llen(queue) == 0:
            _publish(self._celery, uuid.uuid4().hex, TICK, {}, queue)

    def _try(self, dispatch: Callable[[], None], what: str, **extra: str) -> None:
        if not self._may_try():
            log.debug("the broker hangs: did not dispatch %s", what)
            return
        began = time.monotonic()
        try:
            with self._connection():
                dispatch()
            self._rests_until, self._reached = 0.0, time.monotonic()
        except (OperationalError, redis.RedisError, OSError) as error:
            log.warning("could not dispatch %s: %s", what, error, extra=extra)
            now = time.monotonic()
            if now - began > _HANGS_S and self._reached < began:  # else the broker is back meanwhile
                self._rests_until = now + _REST_S

    @contextmanager
    def _connection(self) -> Iterator[None]:
        if not self._free.acquire(timeout=ANSWER_S):
            raise OperationalError(f"{_MOST_AT_ONCE} other messages wait for the broker")
        try:
            yield
        finally:
            self._free.release()

    def _may_try(self) -> bool:
        with self._lock:
            now = time.monotonic()
            if now < self._rests_until:
                return False
            if self._rests_until:
                self._rests_until = now + _REST_S  # the others go on without this call
            return True


def _publish(celery: Celery, task_id: str, name: str, arguments: dict[str, str], queue: str) -> None:
    """Publishes the message of a task, without Celery's own event."""
    message = celery.amqp.as_task_v2(task_id, name, (), arguments, ignore_result=True)
    with celery.producer_or_acquire() as producer:
        celery.amqp.send_task_message(producer, name, message, queue=queue, retry=False)


class TickSender:
    """Sends tick messages to a worker through its own direct queue."""

    def __init__(self, celery: App, queue: str) -> None:
        self._celery, self._queue = celery, queue
        self._broker = connect(celery.redis_url)

    def waiting(self) -> int | None:
        """The number of messages in the queue; None while the broker is away."""
        try:
            return self._broker.llen(self._queue)
        except (redis.RedisError, OSError):
            return None

    def send(self) -> bool:
        """Sends one tick. Returns False when the broker does not accept it because it is away or full."""
        try:
            _publish(self._celery, uuid.uuid4().hex, TICK, {}, self._queue)
        except (OperationalError, redis.RedisError, OSError) as error:
            log.warning("could not send a tick to our own queue: %s", error)
            return False
        return True
