"""The base of all routes: the current request, with its caller, its body and the services that answer it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence, Set
from functools import wraps
from io import BytesIO
from types import MappingProxyType
from typing import IO, Any, Protocol, TypeVar, cast

import redis
from flask import Flask, Request, Response, current_app, g, request
from flask_smorest import Blueprint
from marshmallow import Schema
from webargs import core
from webargs.flaskparser import FlaskParser, is_json_request
from werkzeug.datastructures import Headers
from werkzeug.exceptions import ClientDisconnected, RequestEntityTooLarge
from werkzeug.utils import cached_property
from werkzeug.wsgi import LimitedStream

from app.domain.accounts import Caller, Scope
from app.errors import BadRequest, Forbidden, Unauthorized, Unavailable
from app.services.container import Services
from app.settings import Settings
from app.stores.redis.types import Future
from app.suspension import SUSPENSION, Suspension
from app.telemetry import REQUEST_SECONDS
from app.tracing import requests as traced
from app.wire.bodies import ByteBudget, check_parts, parse_json, unpack

EXTENSION = "tinsmith"
SETTINGS = "TINSMITH_SETTINGS"
"""Key of the settings in an application's config, because blueprints are configured before the services exist."""
View = TypeVar("View", bound=Callable[..., Any])

UNPACKED_AT_ONCE = 8
"""The number of the largest bodies (api.max_body_bytes) that a process holds unpacked at the same time. A few KB of
zstd become so many bytes, and a parsed batch takes a multiple of them."""
_SMALL_VALUES = 2**15
"""Most JSON values in a body without a batch or a prompt. Schemas take 5 us for each."""
_POLL = "futures.retrieve_future"
"""The endpoint that the SDK polls without a pause. Its poll of all samples (retrieve_futures) pauses by itself."""
_unpacked = ByteBudget()
_IN_PATH = re.compile(r"<(?:\w+:)?(\w+)>")


class Resource(Protocol):
    """The typed interface of flask-smorest's Blueprint, which has no types."""

    def route(self, rule: str, *, methods: Sequence[str]) -> Callable[[View], View]: ...

    def arguments(
        self, schema: Schema, *, location: str = "json", error_status_code: int = 422, example: Any = None
    ) -> Callable[[View], View]: ...

    def response(self, status: int, schema: type | Schema | None = None, **options: Any) -> Callable[[View], View]: ...

    def alt_response(self, status: int, **options: Any) -> Callable[[View], View]: ...

    def doc(self, **options: Any) -> Callable[[View], View]: ...


class JsonParser(FlaskParser):
    """webargs' parser with the body limits of this API. A schema's rule for unknown fields applies to a query too."""

    DEFAULT_UNKNOWN_BY_LOCATION = FlaskParser.DEFAULT_UNKNOWN_BY_LOCATION | {"query": None}

    def _raw_load_json(self, req: Request) -> Any:
        """The body's JSON. Raises BadRequest for a body of another type, which Flask would read as no body."""
        if is_json_request(req):
            return json_content()
        if req.content_length or "Transfer-Encoding" in req.headers:
            raise BadRequest(
                f"the body has the Content-Type {req.mimetype[:100]!r}; this call takes JSON, so send the header "
                "Content-Type: application/json"
            )
        return core.missing


class _Blueprint(Blueprint):  # type: ignore[misc]
    """flask-smorest's Blueprint, with the body limits of this API. Its routes are in one group of the documentation,
    with the descriptions of their path parameters."""

    ARGUMENTS_PARSER = JsonParser()

    def __init__(self, name: str, group: str, prefix: str, parameters: Mapping[str, str]) -> None:
        super().__init__(name, __name__, url_prefix=prefix)
        self._group = group
        self._parameters = parameters

    def route(self, rule: str, **options: Any) -> Any:
        described = [
            {"in": "path", "name": name, "description": self._parameters[name]} for name in _IN_PATH.findall(rule)
        ]
        return super().route(rule, parameters=described, tags=[self._group], **options)


class _Body(LimitedStream):
    """werkzeug's stream. It always fails at a maximum, and its error says how much of the body arrived."""

    def readall(self) -> bytes:
        found = super().readall()
        if self.is_exhausted:
            self.on_exhausted()
        return found

    def on_disconnect(self, error: Exception | None = None) -> None:
        try:
            super().on_disconnect(error)
        except ClientDisconnected:
            raise ClientDisconnected(
                f"the body ended after {self.tell()} bytes, before it was complete: send the call again"
            ) from error


class WholeRequest(Request):
    """A request whose body is read to its end or not at all. If the server ends its streams, as gunicorn does, werkzeug
    takes a body that ends before its Content-Length for a whole one, and cuts a longer one without a length at the
    limit."""

    @cached_property
    def stream(self) -> IO[bytes]:
        """The body. Raises RequestEntityTooLarge for one over the limit, also while it is read; reading raises
        ClientDisconnected for one that ends too soon."""
        length, most = self.content_length, self.max_content_length
        assert most is not None
        if length is not None:
            if length > most:
                raise RequestEntityTooLarge
            return cast(IO[bytes], _Body(self.input_stream, length))
        if "wsgi.input_terminated" not in self.environ:
            return BytesIO()
        # One byte more tells a body of the limit from a longer one.
        return cast(IO[bytes], _Body(self.input_stream, most + 1, is_max=True))


def services() -> Services:
    """The services of the application that serves this request."""
    found: Services = current_app.extensions[EXTENSION]
    return found


def _settings() -> Settings:
    found: Settings = current_app.config[SETTINGS]
    return found


def make_blueprint(
    name: str, group: str, prefix: str = "/api/v1", parameters: Mapping[str, str] = MappingProxyType({})
) -> Resource:
    """A blueprint whose routes are below `prefix`, in a group of app/api/docs.py. `parameters` describes every
    parameter in the path of a route; a route with another one is a KeyError."""
    made: Resource = _Blueprint(name, group, prefix, parameters)
    return made


def add_hooks(app: Flask, public: Set[str]) -> None:
    """Makes the application find the caller of each request and measure its time, with the time of its suspension. The
    endpoints and blueprints in `public` need no key."""

    @app.before_request
    def identify() -> None:
        found = suspension()
        g.started = found.began if found is not None and found.is_over else time.perf_counter()
        if public.isdisjoint((request.endpoint, request.blueprint)):
            g.caller = _find_caller()
        tracer = services().tracer
        if tracer and request.method == "POST" and request.url_rule:
            parent = request.headers.get("traceparent", "")
            traced.begin(tracer, f"POST {request.url_rule.rule}", parent, _began())

    @app.after_request
    def measure(response: Response) -> Response:
        traced.end(response.status_code)
        found = suspension()
        if found is not None and found.is_suspended:
            return response
        route = request.url_rule.rule if request.url_rule else "unknown"
        REQUEST_SECONDS.labels(route, response.status_code).observe(time.perf_counter() - g.started)
        return response


def _find_caller() -> Caller:
    """The caller of the current request. A poll whose key cannot be looked up in an outage is held for a moment, as
    in LongPollLimiter.hold."""
    try:
        return services().authenticator(credential(request.headers))
    except (redis.RedisError, Unavailable):
        found = suspension()
        # A poll that was suspended has been held already, and only 8 of these are resumed at a time.
        if request.endpoint != _POLL or (found is not None and found.is_over):
            raise
        with services().poll_limiter.hold(""):  # the project is unknown
            raise


def _began() -> float:
    """The unix time at which the current request began, in seconds."""
    started: float = g.started
    return time.time() - (time.perf_counter() - started)


def trace_poll(future: Future) -> None:
    """Records the current request as the poll that returned the future's result."""
    tracer = services().tracer
    if tracer and future.trace:
        tracer.record("poll", future.trace, _began(), time.time(), traced.described(future.request_id, future.kind))


def credential(headers: Headers) -> str:
    """The key or token in X-API-Key or `Authorization: Bearer`. Raises Unauthorized when there is none."""
    found = headers.get("X-API-Key") or headers.get("Authorization", "").removeprefix("Bearer ")
    if not found:
        raise Unauthorized("no API key: send it in the X-API-Key header, or as `Authorization: Bearer`")
    return found


def suspension() -> Suspension | None:
    """The means to suspend the current request, if its server has one and the request is small."""
    found: Suspension | None = request.environ.get(SUSPENSION)
    return found


def suspended() -> Response:
    """The answer of a view that suspended its request; the server throws it away."""
    return Response(status=202)


def current_caller() -> Caller:
    """The caller of the current request."""
    caller: Caller = g.caller
    return caller


def idempotency_key() -> str | None:
    """The key that all repeats of one call have in common; the SDK sends it with each call that is not a GET."""
    return request.headers.get("X-Idempotency-Key")


def needs(*scopes: Scope) -> Callable[[View], View]:
    """A decorator directly below the route, for every view that changes something. The view raises Forbidden for a key
    that has none of the scopes."""

    def decorate(view: View) -> View:
        @wraps(view)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if current_caller().scopes.isdisjoint(scopes):
                raise Forbidden(
                    f"this needs an API key with the scope {' or '.join(scopes)}, and this key does not have it"
                )
            return view(*args, **kwargs)

        wrapped.scopes = scopes  # type: ignore[attr-defined]
        return cast(View, wrapped)

    return decorate


def at_most(size: int) -> Callable[[View], View]:
    """A decorator directly below the route. The view answers 413 for a larger body, before parsing it."""
    return _limited(lambda: size)


def large(view: View) -> View:
    """A decorator directly below the route. The view accepts a body (with a batch or a prompt) up to
    api.max_body_bytes."""
    return _limited(lambda: _settings().api.max_body_bytes, is_large=True)(view)


def _limited(size: Callable[[], int], *, is_large: bool = False) -> Callable[[View], View]:
    def decorate(view: View) -> View:
        @wraps(view)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            request.max_content_length = size()
            g.is_large, g.unpacked = is_large, 0
            try:
                return view(*args, **kwargs)
            finally:
                _unpacked.give_back(g.unpacked)

        return cast(View, wrapped)

    return decorate


def content() -> bytes:
    """The body, unpacked. Raises BadRequest or TooLarge, or 413 when it is over the route's limit, or 400 when it ends
    too soon. Raises Unavailable while other views hold too many unpacked bytes."""
    most = request.max_content_length
    assert most is not None
    return unpack(request.get_data(), request.headers.get("Content-Encoding", ""), most, _take_unpacked)


def _take_unpacked(size: int) -> None:
    """Counts the unpacked bytes of a large body until its view ends. A body that is read again counts once."""
    if g.get("is_large") and not g.unpacked:
        _unpacked.take(size, UNPACKED_AT_ONCE * _settings().api.max_body_bytes)
        g.unpacked = size


def json_content() -> Any:
    """The body's JSON. Raises the errors of `content`, and of `parse_json`."""
    limits = _settings().limits
    most = limits.json_values if g.get("is_large") else min(limits.json_values, _SMALL_VALUES)
    return parse_json(content(), limits, most)


def batch_content() -> bytes:
    """The body of a protobuf batch. Raises the errors of `content`, also for too many parts."""
    body = content()
    check_parts(body, _settings().limits)
    return body
