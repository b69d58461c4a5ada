"""The API's spans: of requests that admit a future, and of the poll that returns its result."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from flask import Flask
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from app.api.base import EXTENSION
from app.errors import SetupError
from app.services.tenants.authentication import project_of
from app.settings import TracingSettings, hash_key
from app.stores.redis import keys
from app.tracing import tracer
from tests.unit.app.conftest import API, KEY, Api, batch

CLIENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
NOT_SAMPLED = CLIENT[:-2] + "00"
TOKENS = [41, 42, 43]


class Traced:
    """An API that records its spans."""

    def __init__(self, api: Api) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracer = tracer.Tracer(self.exporter, "tests")
        self.api = replace(api, services=replace(api.services, tracer=self.tracer))
        self.model = api.model()

    def train(self, seq: int, parent: str = "") -> str:
        body = batch(self.model, seq, tokens=TOKENS).SerializeToString()
        headers = {"X-API-Key": self.api.key, "Content-Type": "application/x-protobuf", "traceparent": parent}
        answer = self.api.client.post(f"{API}/forward_backward", data=body, headers=headers)
        assert answer.status_code == 200
        return answer.json["request_id"]

    def poll(self, request_id: str) -> int:
        return self.api.post("retrieve_future", {"request_id": request_id}).status_code

    def spans(self) -> list[ReadableSpan]:
        self.tracer.flush()
        return list(self.exporter.get_finished_spans())


@pytest.fixture
def traced(api: Api, app: Flask, monkeypatch: pytest.MonkeyPatch) -> Traced:
    made = Traced(api)
    monkeypatch.setitem(app.extensions, EXTENSION, made.api.services)
    return made


def test_a_request_that_admits_a_future_is_a_span_below_its_clients(traced: Traced):
    request_id = traced.train(1, CLIENT)
    (span,) = traced.spans()
    assert span.name == f"POST {API}/forward_backward"
    assert span.parent is not None and f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" == CLIENT[3:-3]
    assert dict(span.attributes or {}) == {
        "tinsmith.request_id": request_id,
        "tinsmith.kind": "forward_backward",
        "tinsmith.project": project_of(hash_key(KEY)),
        "http.response.status_code": 200,
    }
    assert span.start_time is not None and span.end_time is not None and span.start_time < span.end_time


def test_the_poll_that_returns_the_result_belongs_to_the_trace_and_others_do_not(traced: Traced):
    request_id = traced.train(1)
    assert traced.poll(request_id) == 408
    traced.api.commit(traced.model, 1)
    assert traced.poll(request_id) == 200
    request, poll = traced.spans()
    assert (request.parent, poll.name) == (None, "poll")
    assert poll.parent is not None and request.context is not None
    assert (poll.parent.trace_id, poll.parent.span_id) == (request.context.trace_id, request.context.span_id)


def test_a_retry_and_a_request_that_admits_nothing_are_no_spans(traced: Traced):
    traced.train(1)
    traced.train(1)
    traced.api.post("create_session", {})
    assert len(traced.spans()) == 1


@pytest.mark.parametrize("parent", ["", "nonsense", CLIENT.upper(), "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_wrong_or_missing_context_begins_a_trace(traced: Traced, parent: str):
    traced.train(1, parent)
    assert [span.parent for span in traced.spans()] == [None]


def test_a_client_that_does_not_sample_its_trace_gets_none(traced: Traced):
    request_id = traced.train(1, NOT_SAMPLED)
    assert (traced.spans(), traced.api.services.oplog.trace_of(request_id)) == ([], "")


def test_without_tracing_a_future_has_no_field_for_it_and_is_polled_as_ever(api: Api):
    model = api.model()
    request_id = api.forward_backward(batch(model, 1)).json["request_id"]
    assert b"trace" not in api.services.oplog._redis.hgetall(keys.future(request_id))
    api.commit(model, 1)
    assert api.post("retrieve_future", {"request_id": request_id}).status_code == 200


def test_without_tracing_the_api_loads_no_exporter():
    code = (
        "import sys, app.web; from app.settings import TracingSettings; from app.tracing import tracer; "
        "tracer.create(TracingSettings(), 'tests'); print('opentelemetry.exporter' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_without_the_packages_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(SetupError, match=r'pip install "tinsmith\[tracing\]"'):
        tracer.create(TracingSettings(endpoint="http://127.0.0.1:4318"), "tests")
