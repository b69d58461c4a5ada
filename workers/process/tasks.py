"""The Celery tasks: one name for each kind of future. The task's id is the request id, and no payload is sent along.

A task ends as its future does (succeeded, failed), or as RETRY when the request has to be dispatched again.
"""

from __future__ import annotations

import logging

from celery import Task, shared_task
from celery.exceptions import Retry

from app.dispatch import KINDS, TICK, task_name
from app.errors import OpError, Requeue
from workers.process import assembly

log = logging.getLogger(__name__)


class FutureFailed(OpError):
    """The future failed; the result that a poll returns holds its text."""


def _handle(task: Task, model_id: str) -> None:
    request_id = task.request.id
    queue = task.request.delivery_info["routing_key"]
    try:
        result = assembly.current().handle(request_id, model_id, task.name.rpartition(".")[2], queue)
    except Requeue as reason:
        # Raised directly: task.retry() would publish a second message, and the missing part dispatches the request
        # itself.
        raise Retry(str(reason)) from None
    except Exception as error:
        # The future is not terminal, so the task must not be either; the redispatch task dispatches the request again.
        log.exception("could not handle a future", extra={"request_id": request_id})
        raise Retry(f"{request_id}: {type(error).__name__}") from error
    if result is not None and result.failed:
        raise FutureFailed(f"{request_id} failed")


def _tick() -> None:
    assembly.current().tick()


shared_task(name=TICK, send_events=False)(_tick)
for _kind in KINDS:
    shared_task(bind=True, name=task_name(_kind), throws=(FutureFailed,))(_handle)
