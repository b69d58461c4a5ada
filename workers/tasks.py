"""The Celery tasks: one name a kind of future, the task's id is the request id, and nothing rides along.

A task ends as its future does (succeeded, failed), or as RETRY when it has to be rung again.
"""

from __future__ import annotations

from celery import Task, shared_task
from celery.exceptions import Retry

from app.doorbell import KINDS, task_name
from app.errors import OpError
from workers import runtime
from workers.outcome import NotNow


class FutureFailed(OpError):
    """The future failed; its text is in the result a poll returns."""


def _handle(task: Task, model_id: str) -> None:
    try:
        result = runtime.current().handle(task.request.id, model_id, task.name.rpartition(".")[2])
    except NotNow as reason:
        # Raised directly: task.retry() would publish a second message, and what is missing rings by itself.
        raise Retry(str(reason)) from None
    if result is not None and result.failed:
        raise FutureFailed(f"{task.request.id} failed")


for _kind in KINDS:
    shared_task(bind=True, name=task_name(_kind), throws=(FutureFailed,))(_handle)
