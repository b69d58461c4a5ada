"""The tracer: records spans and sends them to a collector, by OTLP over HTTP.

OpenTelemetry is imported only where tracing is on. The context of a span is a text, its W3C traceparent, which a future
keeps in its record. It is empty where nothing is traced.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from app.errors import SetupError
from app.settings import TracingSettings

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

Attributes = Mapping[str, str | int | float]
NOT_INSTALLED = 'tracing.endpoint needs OpenTelemetry; run `pip install "tinsmith[tracing]"`, or leave it out'
_FLUSH_MS = 2000
_TRACEPARENT = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class Tracer:
    """Records spans; may be used from any thread. Times are in unix seconds."""

    def __init__(self, exporter: SpanExporter, service: str, instance: str = "") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        names = {"service.name": service, "service.instance.id": instance}
        self._provider = TracerProvider(resource=Resource.create({key: name for key, name in names.items() if name}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tinsmith")

    def start(self, name: str, parent: str, began: float) -> Span:
        """Starts a span, below the span with the context `parent`. A text that is no context starts a trace."""
        return self._tracer.start_span(name, _context(parent), start_time=_ns(began))

    def record(
        self, name: str, parent: str, began: float, ended: float, attributes: Attributes, failure: str = ""
    ) -> None:
        """Records a span that is over. `failure` is empty unless it failed."""
        from opentelemetry.trace import Status, StatusCode

        span = self.start(name, parent, began)
        span.set_attributes(attributes)
        if failure:
            span.set_status(Status(StatusCode.ERROR, failure))
        span.end(_ns(ended))

    def context_of(self, span: Span) -> str:
        """The span's context; empty for a span that is not recorded, because its client does not want it."""
        own = span.get_span_context()
        return f"00-{own.trace_id:032x}-{own.span_id:016x}-01" if span.is_recording() else ""

    def flush(self) -> None:
        """Sends what was recorded, within seconds."""
        self._provider.force_flush(_FLUSH_MS)


def create(settings: TracingSettings, service: str, instance: str = "") -> Tracer | None:
    """The tracer of this process; None without a collector. Raises SetupError when OpenTelemetry is not installed."""
    if not settings.endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise SetupError(NOT_INSTALLED) from None
    return Tracer(OTLPSpanExporter(f"{settings.endpoint.rstrip('/')}/v1/traces"), service, instance)


def _context(text: str) -> Context:
    """The context in which the span of this traceparent is the current one; an empty context for another text."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    match = _TRACEPARENT.fullmatch(text)
    if not match:
        return Context()
    trace_id, span_id, flags = (int(part, 16) for part in match.groups())
    found = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return set_span_in_context(NonRecordingSpan(found), Context())


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
