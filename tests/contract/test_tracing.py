"""Traces of a whole stack, as a collector gets them by OTLP over HTTP."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.contract.data import supervised
from tests.contract.stack import BASE, Stack, running
from tests.faults.world import await_true
from tests.http_server import Handler, serving
from tests.servers import free_port


class Collector:
    """The spans that were received, with the service that sent each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._received: list[tuple[str, Span]] = []

    def receive(self, body: bytes) -> None:
        for part in ExportTraceServiceRequest.FromString(body).resource_spans:
            (service,) = (each.value.string_value for each in part.resource.attributes if each.key == "service.name")
            with self._lock:
                self._received += [(service, span) for scope in part.scope_spans for span in scope.spans]

    def of(self, request_id: str) -> dict[str, tuple[str, Span]]:
        """The service and the span, by the names of a future's spans."""
        with self._lock:
            return {
                span.name: (service, span)
                for service, span in self._received
                if any(each.value.string_value == request_id for each in span.attributes)
            }


@pytest.fixture
def collector() -> Iterator[tuple[str, Collector]]:
    made = Collector()

    class Receiver(Handler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            made.receive(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.answer(200 if self.path == "/v1/traces" else 404, {})

    with serving(Receiver) as url:
        yield url, made


def test_a_call_is_one_tree_from_the_request_to_the_commit_and_the_poll(
    collector: tuple[str, Collector], tmp_path: Path, base_path: Path, monkeypatch: pytest.MonkeyPatch
):
    url, received = collector
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    endpoint = f'[tracing]\nendpoint = "{url}"'
    stack = Stack(tmp_path / "data", base_path, free_port(), 'backend = "torch"', 'backend = "transformers"', endpoint)
    with running(stack), stack.client() as client:
        training = client.create_lora_training_client(base_model=BASE, rank=4).result()
        training.forward_backward(supervised(), "cross_entropy").result()
        request_id = f"{training.model_id}:1"
        await_true(lambda: len(received.of(request_id)) == 5, "spans are missing")
    spans = received.of(request_id)
    assert {name: service for name, (service, _) in spans.items()} == {
        "POST /api/v1/forward_backward": "tinsmith-api",
        "queue": "tinsmith-worker",
        "run": "tinsmith-worker",
        "commit": "tinsmith-worker",
        "poll": "tinsmith-api",
    }
    _, root = spans.pop("POST /api/v1/forward_backward")
    assert not root.parent_span_id
    assert {(span.trace_id, span.parent_span_id) for _, span in spans.values()} == {(root.trace_id, root.span_id)}
    assert "restore" in received.of(f"{training.model_id}:0"), "a model is restored for its first call"
