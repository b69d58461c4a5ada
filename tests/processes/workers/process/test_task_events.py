"""Celery's task events of futures, as a real receiver gets them from a real worker: the data of Flower's pages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from celery import Celery
from celery.events.state import State, Task

from app.dispatch import Dispatcher, TaskEvents, celery_app
from app.domain import ops
from app.domain.records import Model, Sampler
from app.domain.sampling import SampleRequest
from app.settings import RedisSettings, Settings
from app.stores.redis.client import connect
from app.stores.redis.records import RedisRecords, dump
from tests.faults.world import await_true
from tests.processes.workers.process.test_orderly_stop import SAMPLER, Workers
from tests.property.vector_backend import BREAKING, POISON, backward
from tests.property.world import BASE, CREATE, MODEL
from tests.servers import start_valkey

FIRST, REFUSED, LAST = f"{MODEL}:1", f"{MODEL}:3", f"{MODEL}:4"
SAMPLE, CANCELLED = f"{SAMPLER}:0", f"{SAMPLER}:1"


class Dashboard:
    """Celery's view of the cluster. `states` has the states of each task, in order."""

    def __init__(self, celery: Celery) -> None:
        self.tasks: State = celery.events.State()
        self.states: dict[str, list[str]] = {}

    def note(self, event: dict[str, Any]) -> None:
        self.tasks.event(event)
        if "uuid" in event:
            self.states.setdefault(event["uuid"], []).append(self.task(event["uuid"]).state)

    def have_ended(self, *request_ids: str) -> bool:
        return all(self.states.get(id_, [""])[-1] in ("SUCCESS", "FAILURE", "REVOKED") for id_ in request_ids)

    def task(self, request_id: str) -> Task:
        return self.tasks.tasks[request_id]


@contextmanager
def watching(celery: Celery, events: TaskEvents) -> Iterator[Dashboard]:
    """A dashboard that receives each event from now on."""
    dashboard = Dashboard(celery)
    with celery.connection_for_read() as connection:
        receiver = celery.events.Receiver(connection, handlers={"*": dashboard.note})
        thread = threading.Thread(target=receiver.capture, kwargs={"wakeup": False})
        thread.start()
        try:
            await_true(lambda: events.admitted("first:0", "sample", "me") or dashboard.states, "no event came")
            yield dashboard
        finally:
            receiver.should_stop = True
            thread.join()


def admit(workers: Workers, events: TaskEvents) -> None:
    """Admits futures as the API does: a model, three batches of which the second and the third fail, a sample,
    and one that is cancelled before it begins."""
    workers.oplog.create_model(MODEL, dump(Model("me", "session", BASE, 0.0)))
    assert workers.oplog.refuse(MODEL, 3, "refused")
    calls = {0: CREATE, 1: backward(1), 2: backward(2, POISON, forward_only=True), 4: backward(3, BREAKING)}
    for seq, op in calls.items():
        payload = ops.encode(op)
        request_id = workers.oplog.admit(MODEL, seq, op.kind, payload, ops.digest(payload)).request_id
        events.admitted(request_id, op.kind, "me")
    RedisRecords(workers.client).put_new(Sampler.namespace, SAMPLER, dump(Sampler("me", "session", BASE, 0.0)))
    payload = ops.encode(SampleRequest(np.array([5]), 1, 4, seed=3))
    for request_id in (SAMPLE, CANCELLED):
        workers.oplog.admit_sample(request_id, SAMPLER, "me", f"sample.{BASE}", payload, ops.digest(payload))
        events.admitted(request_id, "sample", "me")


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """The dashboard after a run in which the first trainer was killed during the first batch."""
    folder = tmp_path_factory.mktemp("events")
    with start_valkey(folder / "valkey") as url, connect(url) as client:
        celery, workers = celery_app(Settings(redis=RedisSettings(url=url))), Workers(url, client, folder)
        events = Dispatcher(celery).events
        with watching(celery, events) as dashboard:
            admit(workers, events)
            with workers.running("trainer") as process:
                workers.until(lambda: "STARTED" in dashboard.states.get(FIRST, ()), process)
            (folder / "go").touch()
            assert workers.oplog.cancel_sample(CANCELLED)  # the killed worker might have lost its event
            for role, request_ids in (("trainer", (LAST,)), ("sampler", (SAMPLE, CANCELLED))):
                with workers.running(role) as process:
                    workers.until(partial(dashboard.have_ended, *request_ids), process)
            yield dashboard
        events.close()


def test_each_future_is_one_task_with_its_name_model_project_and_end(dashboard: Dashboard):
    tasks = [dashboard.task(f"{MODEL}:{seq}") for seq in (0, 1, 2, 4)]
    assert [(task.name, task.state) for task in tasks] == [
        ("tinsmith.create_model", "SUCCESS"),
        ("tinsmith.forward_backward", "SUCCESS"),
        ("tinsmith.forward", "FAILURE"),
        ("tinsmith.forward_backward", "FAILURE"),
    ]
    assert {task.kwargs for task in tasks} == {repr({"project": "me", "model_id": MODEL})}
    assert {task.worker.hostname.partition("@")[0] for task in tasks} == {"worker"}


def test_a_task_has_the_times_and_the_runtime_of_its_future(dashboard: Dashboard):
    task = dashboard.task(FIRST)
    assert task.sent <= task.received <= task.started <= task.succeeded
    assert task.runtime > 0  # of another clock than the times


def test_dispatches_send_no_events_of_their_own(dashboard: Dashboard):
    assert dashboard.states[f"{MODEL}:2"] == ["PENDING", "RECEIVED", "STARTED", "FAILURE"]


def test_a_refused_call_is_no_task(dashboard: Dashboard):
    assert REFUSED not in dashboard.states


def test_a_sample_is_a_task_of_its_sampling_session(dashboard: Dashboard):
    task = dashboard.task(SAMPLE)
    assert (task.name, task.state) == ("tinsmith.sample", "SUCCESS")
    assert task.kwargs == repr({"project": "me", "sampling_session_id": SAMPLER})


def test_a_sample_that_is_cancelled_before_it_begins_is_revoked_once(dashboard: Dashboard):
    assert dashboard.states[CANCELLED] == ["PENDING", "REVOKED"]
    assert dashboard.task(CANCELLED).name == "tinsmith.sample"


def test_a_future_whose_worker_was_killed_is_retried_once(dashboard: Dashboard):
    assert dashboard.task(FIRST).retries == 1
    begun = ["RECEIVED", "STARTED"]
    assert dashboard.states[FIRST] == ["PENDING", *begun, "RETRY", *begun, "SUCCESS"]


def test_a_future_that_breaks_the_backend_is_retried_until_it_fails(dashboard: Dashboard):
    begun = ["RECEIVED", "STARTED"]
    assert dashboard.states[LAST] == ["PENDING", *begun, "RETRY", *begun, "RETRY", *begun, "FAILURE"]
