"""Dispatch through Celery: one named task for each future. The task id is the request id; the task has no payload.

Dispatch is best effort: the journal is the truth, so a lost, doubled or reordered message changes nothing.
"""

from __future__ import annotations

import logging
import uuid

import redis
from celery import Celery
from kombu.exceptions import OperationalError

from app import broker
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


def task_name(kind: str) -> str:
    """The name of the Celery task of a journalled kind."""
    return f"tinsmith.{kind if kind in KINDS else CATCH_UP}"


def train_queue(base_model: str, *, full: bool = False) -> str:
    """The queue of a base model's trainers, or with `full` of its trainers for full fine-tuning."""
    return f"{'full' if full else 'train'}.{base_model}"


def sample_queue(base_model: str, *, full: bool = False) -> str:
    """The queue of a base model's samplers, or with `full` of its samplers for fully fine-tuned models."""
    return f"{'fullsample' if full else 'sample'}.{base_model}"


def direct_queue(queue: str, node: str) -> str:
    """The queue that only one node reads, for the models it owns."""
    return f"{queue}@{node}"


def celery_app(settings: Settings) -> Celery:
    """The one Celery configuration, for the API that dispatches tasks and the workers that consume them."""
    broker.register()
    app = Celery("tinsmith", broker=settings.broker_url)
    app.conf.update(
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
            "visibility_timeout": 12 * 3600,
            "unacked_restore_interval": 5,
            "unacked_restore_throttle": 1,
            "health_check_interval": 10,
            "socket_connect_timeout": 2,
            "socket_timeout": ANSWER_S,
            # Once more, on a new connection. A message whose acknowledgement fails otherwise counts as prefetched for
            # ever, and its consumer reads no other.
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


class Dispatcher:
    """Dispatches futures that wait in the journal."""

    def __init__(self, celery: Celery) -> None:
        self._celery = celery

    def send(self, kind: str, request_id: str, parent_id: str, queue: str) -> None:
        """Dispatches one future. Does not raise when the broker is away: the sweeper dispatches the future again.

        `parent_id` is the model or sampling session. It is shown beside the task's name in Flower.
        """
        try:
            self._celery.send_task(
                task_name(kind), kwargs={"model_id": parent_id}, task_id=request_id, queue=queue, retry=False
            )
        except (OperationalError, OSError) as error:
            log.warning("could not dispatch %s: %s", request_id, error, extra={"request_id": request_id})

    def wake(self, holder: Holder) -> None:
        """Makes a trainer check at once which models it may free."""
        queue = train_queue(holder.base_model, full=holder.full)
        TickSender(self._celery, direct_queue(queue, holder.node)).send()


class TickSender:
    """Sends tick messages to a worker through its own direct queue, without events: Flower does not show them."""

    def __init__(self, celery: Celery, queue: str) -> None:
        self._celery, self._queue = celery, queue
        self._broker = connect(celery.conf.broker_url)

    def waiting(self) -> int | None:
        """The number of messages in the queue; None while the broker is away."""
        try:
            return self._broker.llen(self._queue)
        except (redis.RedisError, OSError):
            return None

    def send(self) -> bool:
        """Sends one tick. Returns False when the broker does not accept it because it is away or full."""
        message = self._celery.amqp.as_task_v2(uuid.uuid4().hex, TICK, (), {}, ignore_result=True)
        try:
            with self._celery.producer_or_acquire() as producer:
                self._celery.amqp.send_task_message(producer, TICK, message, queue=self._queue, retry=False)
        except (OperationalError, redis.RedisError, OSError) as error:
            log.warning("could not send a tick to our own queue: %s", error)
            return False
        return True
