"""A worker's spans: the wait, each attempt, the restore and the commit of a future are in the trace of its request."""

from __future__ import annotations

import pytest
import redis
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from app.domain import ops
from app.domain.ops import Op
from app.errors import Fenced, Requeue, Unavailable
from app.tracing.tracer import Tracer
from tests.unit.workers.conftest import MODEL, World, step
from workers.process import telemetry
from workers.process.op_traces import OpTraces

REQUEST = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Traces:
    def __init__(self, world: World) -> None:
        self._world = world
        self._exporter = InMemorySpanExporter()
        self._tracer = Tracer(self._exporter, "tests")
        self._op_traces = OpTraces(self._tracer, world.oplog.trace_of)
        telemetry.trace_ops(self._op_traces)

    def admit(self, seq: int, op: Op) -> None:
        payload = ops.encode(op)
        self._world.oplog.admit(MODEL, seq, op.kind, payload, ops.digest(payload), trace=REQUEST)

    def spans(self) -> list[ReadableSpan]:
        self._tracer.flush()
        return list(self._exporter.get_finished_spans())

    def kept(self) -> list[str]:
        """The attempts that have not ended."""
        return list(self._op_traces._running)

    def names(self) -> list[str]:
        return [span.name for span in self.spans()]


@pytest.fixture
def traces(world: World, monkeypatch: pytest.MonkeyPatch) -> Traces:
    monkeypatch.setattr(telemetry, "_op_traces", None)
    return Traces(world)


def test_an_op_waits_runs_and_commits_in_the_trace_of_its_request(world: World, traces: Traces):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    traces.admit(1, step()[0])
    worker.handle(1)
    spans = traces.spans()
    assert [span.name for span in spans] == ["queue", "run", "commit"]
    assert all(span.parent for span in spans)
    parents = {f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" for span in spans if span.parent}
    assert parents == {REQUEST[3:-3]}
    queued, ran, _ = spans
    assert queued.end_time == ran.start_time
    assert all((span.start_time or 0) <= (span.end_time or 0) for span in spans)


def test_the_spans_of_an_op_have_its_ids_and_counts_alone(world: World, traces: Traces):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    traces.admit(1, step()[0])
    worker.handle(1)
    run = dict(traces.spans()[1].attributes or {})
    assert run == {
        "tinsmith.request_id": f"{MODEL}:1",
        "tinsmith.kind": "forward_backward",
        "tinsmith.project": "me",
        "tinsmith.lost_attempts": 0,
        "tinsmith.ops_in_pass": 1,
    }


def test_an_op_that_runs_again_has_two_runs_in_one_trace(world: World, traces: Traces, monkeypatch: pytest.MonkeyPatch):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    traces.admit(1, step()[0])

    def broken(*_: object) -> None:
        raise RuntimeError("no memory on the device")

    with monkeypatch.context() as patch:
        patch.setattr(worker.backend, "apply", broken)
        with pytest.raises(Requeue):
            worker.handle(1)
    worker.handle(1)
    runs = [span for span in traces.spans() if span.name == "run"]
    assert [span.status.status_code for span in runs] == [StatusCode.ERROR, StatusCode.UNSET]
    assert [(span.attributes or {})["tinsmith.lost_attempts"] for span in runs] == [0, 1]
    assert len({span.context.trace_id for span in runs if span.context}) == 1
    assert runs[0].status.description == "the backend failed: RuntimeError"


def test_a_call_that_is_cancelled_while_it_runs_ends_its_run(world: World, traces: Traces):
    traces.admit(1, step()[0])
    entry = world.oplog.entry(MODEL, 1)
    assert entry is not None
    telemetry.op_started(entry, "me")
    telemetry.op_abandoned(entry.request_id, "the call was cancelled")
    assert [(span.name, span.status.status_code) for span in traces.spans()] == [
        ("queue", StatusCode.UNSET),
        ("run", StatusCode.ERROR),
    ]


def test_a_restore_belongs_to_the_op_that_needs_it(world: World, traces: Traces):
    first = world.worker("a/1")
    first.handle(0, "create_model")
    first.drain.release()
    traces.admit(1, step()[0])
    world.worker("b/1").handle(1)
    assert traces.names() == ["restore", "queue", "run", "commit"]


def test_an_op_that_was_admitted_without_a_trace_runs_without_spans(world: World, traces: Traces):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    world.admit(1, step()[0])
    assert worker.handle(1) is not None
    assert traces.names() == []


def test_no_attempt_is_kept_when_its_commit_is_in_doubt(world: World, traces: Traces, monkeypatch: pytest.MonkeyPatch):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    traces.admit(1, step()[0])

    def cut_off(*_: object) -> None:
        raise redis.ConnectionError("cut off at state.internal:6379")

    monkeypatch.setattr(world.oplog, "commit", cut_off)
    with pytest.raises(Requeue):
        worker.handle(1)
    assert traces.kept() == []


def test_no_attempt_is_kept_when_another_worker_owns_the_model_during_the_pass(
    world: World, traces: Traces, monkeypatch: pytest.MonkeyPatch
):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    traces.admit(1, step()[0])

    def fenced(*_: object) -> None:
        raise Fenced("another worker owns it")

    monkeypatch.setattr(worker.backend, "apply", fenced)
    with pytest.raises(Requeue):
        worker.handle(1)
    assert traces.kept() == []


def test_no_span_has_the_text_of_an_error(world: World, traces: Traces, monkeypatch: pytest.MonkeyPatch):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    traces.admit(1, step()[0])

    def away(*_: object) -> None:
        raise Unavailable("the bucket secret-bucket at /srv/private is away")

    monkeypatch.setattr(worker.backend, "apply", away)
    with pytest.raises(Requeue):
        worker.handle(1)
    assert [span.status.description for span in traces.spans()] == [None, "Unavailable"]
