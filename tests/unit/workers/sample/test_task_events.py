"""A sample's task events and spans tell how its call ended, once, and no error's text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from app.dispatch import TaskEvents, celery_app
from app.domain.results import JSON, Result
from app.domain.sampling import SampleOutput
from app.errors import Requeue, ServerOpError, Unavailable
from app.settings import Settings
from app.tracing.tracer import Tracer
from tests.unit.workers.conftest import World
from tests.unit.workers.sample.test_runner import SESSION, Engine, admit, runner
from workers.backends.sampling.base import Aborted, SamplerBackend
from workers.process import telemetry
from workers.process.op_traces import OpTraces

REQUEST = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Sent(TaskEvents):
    """Notes the events in place of the thread that sends them."""

    def __init__(self) -> None:
        super().__init__(celery_app(Settings()))
        self.fields: list[dict[str, Any]] = []
        self.types: list[str] = []

    def _put(self, type_: str, request_id: str, **fields: Any) -> None:
        self.types.append(type_)
        self.fields.append(fields)


class Spans:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._tracer = Tracer(self._exporter, "tests")
        self.op_traces = OpTraces(self._tracer, lambda _: REQUEST)

    def names(self) -> list[str]:
        self._tracer.flush()
        return [span.name for span in self._exporter.get_finished_spans()]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    sent = Sent()
    monkeypatch.setattr(telemetry, "_task_events", sent)
    return sent


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    spans = Spans()
    monkeypatch.setattr(telemetry, "_op_traces", spans.op_traces)
    return spans


def backend(sample: Callable[[], SampleOutput]) -> SamplerBackend:
    class Sampling(Engine):
        def sample(self, *_: object) -> SampleOutput:
            return sample()

    return cast(SamplerBackend, Sampling())


def failing() -> SampleOutput:
    raise ServerOpError("the prompt is too long")


def test_a_failed_sample_has_one_failure_however_often_it_is_dispatched(world: World, sent: Sent, spans: Spans):
    sampler, request = runner(world, backend(failing), "s/1"), admit(world, 0)
    for _ in range(3):
        sampler.handle(request, SESSION, "sample")
    assert sent.types == ["task-received", "task-started", "task-failed"]
    assert spans.names() == ["queue", "run", "commit"]


def test_a_sample_that_is_cancelled_while_it_runs_has_no_end_from_its_worker(world: World, sent: Sent, spans: Spans):
    request = admit(world, 0)

    def cancelled() -> SampleOutput:
        world.oplog.cancel_sample(request)
        raise Aborted("cancelled")

    runner(world, backend(cancelled), "s/1").handle(request, SESSION, "sample")
    assert sent.types == ["task-received", "task-started"]
    assert spans.names() == ["queue", "run"]


def test_a_sample_that_is_cancelled_at_its_end_has_no_success_and_no_commit(world: World, sent: Sent, spans: Spans):
    request = admit(world, 0)

    def too_late() -> SampleOutput:
        world.oplog.cancel_sample(request)
        return SampleOutput(())

    runner(world, backend(too_late), "s/1").handle(request, SESSION, "sample")
    assert sent.types == ["task-received", "task-started"]
    assert spans.names() == ["queue", "run"]


def test_a_sample_that_a_faster_worker_finished_has_no_end_from_the_slower_one(world: World, sent: Sent, spans: Spans):
    request = admit(world, 0)

    def slower() -> SampleOutput:
        world.oplog.finish_sample(request, Result(b"{}", JSON))
        return SampleOutput(())

    runner(world, backend(slower), "s/1").handle(request, SESSION, "sample")
    assert sent.types == ["task-received", "task-started"]
    assert spans.op_traces._running == {}


def test_a_retry_has_the_kind_of_its_error_alone(world: World, sent: Sent):
    def away() -> SampleOutput:
        raise Unavailable("the bucket secret-bucket at /srv/private is away")

    with pytest.raises(Requeue):
        runner(world, backend(away), "s/1").handle(admit(world, 0), SESSION, "sample")
    assert sent.types[-1] == "task-retried"
    assert sent.fields[-1]["exception"] == "Unavailable"
