"""Traces of a whole stack, as a collector gets them by OTLP over HTTP."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
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


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, base_path: Path) -> Iterator[tuple[Stack, Collector]]:
    """A stack, and the collector that gets its spans soon."""
    collector = Collector()

    class Receiver(Handler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.receive(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.answer(200 if self.path == "/v1/traces" else 404, {})

    folder, parts = tmp_path_factory.mktemp("traced"), ('backend = "torch"', 'backend = "transformers"')
    with serving(Receiver) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        extra, program = f'[tracing]\nendpoint = "{url}"', "tests.warm_workers"
        stack = Stack(folder / "data", base_path, free_port(), *parts, extra, program)
        with running(stack):
            yield stack, collector


def test_a_call_is_one_tree_from_the_request_to_the_commit_and_the_poll(traced: tuple[Stack, Collector]):
    stack, received = traced
    with stack.client() as client:
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


def test_the_tree_of_a_call_is_below_its_clients_span(traced: tuple[Stack, Collector]):
    stack, received = traced
    trace_id, span_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    headers = {"traceparent": f"00-{trace_id}-{span_id}-01"}
    with tinker.ServiceClient(base_url=stack.url, api_key=stack.api_key, default_headers_overrides=headers) as client:
        training = client.create_lora_training_client(base_model=BASE, rank=4).result()
    await_true(lambda: len(received.of(f"{training.model_id}:0")) == 6, "spans are missing")
    spans = [span for _, span in received.of(f"{training.model_id}:0").values()]
    assert {span.trace_id.hex() for span in spans} == {trace_id}
    assert [span.name for span in spans if span.parent_span_id.hex() == span_id] == ["POST /api/v1/create_model"]
