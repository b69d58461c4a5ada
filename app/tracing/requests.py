"""The span of the request that is being answered. It is sent only if the request admits a future."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.tracing.tracer import Tracer

if TYPE_CHECKING:
    from opentelemetry.trace import Span


@dataclass
class _Request:
    span: Span
    context: str
    admits: bool = False


_current: ContextVar[_Request | None] = ContextVar("tinsmith_request", default=None)


def begin(tracer: Tracer, name: str, parent: str, began: float) -> None:
    """Starts the span of a request, below the client's span with the context `parent`."""
    span = tracer.start(name, parent, began)
    _current.set(_Request(span, tracer.context_of(span)))


def context() -> str:
    """The context of the request's span; empty where nothing is traced."""
    current = _current.get()
    return current.context if current else ""


def admitted(request_id: str, kind: str, project: str) -> None:
    """Notes that the request admitted a future."""
    current = _current.get()
    if current:
        current.admits = True
        current.span.set_attributes(described(request_id, kind) | {"tinsmith.project": project})


def end(status: int) -> None:
    """Ends the span."""
    current = _current.get()
    _current.set(None)
    if current and current.admits:
        current.span.set_attribute("http.response.status_code", status)
        current.span.end()


def described(request_id: str, kind: str) -> dict[str, str]:
    """The attributes of every span of a future."""
    return {"tinsmith.request_id": request_id, "tinsmith.kind": kind}
