"""The request at hand: its caller and the scopes of the key, its body, and the services that answer it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

from flask import Request, current_app, g, request
from flask_smorest import Blueprint
from marshmallow import Schema
from webargs import core
from webargs.flaskparser import FlaskParser, is_json_request
from werkzeug.datastructures import Headers

from app.domain.accounts import Caller, Scope
from app.errors import Forbidden, Unauthorized
from app.services.container import Services
from app.settings import Settings
from app.wire import json_forms
from app.wire.body_limits import check_depth, check_parts, check_values, unpack

EXTENSION = "tinsmith"
View = TypeVar("View", bound=Callable[..., Any])

SETTINGS = "TINSMITH_SETTINGS"
"""Where an application's config has its settings: what a blueprint is made of can not wait for the services."""
AnyView = Callable[..., Any]


class Resource(Protocol):
    """flask-smorest's Blueprint, which comes without types."""

    def route(self, rule: str, *, methods: Sequence[str]) -> Callable[[View], View]: ...

    def arguments(
        self, schema: Schema, *, location: str = "json", error_status_code: int = 422
    ) -> Callable[[View], View]: ...

    def response(self, status: int, schema: type | Schema | None = None, **options: Any) -> Callable[[View], View]: ...

    def alt_response(self, status: int, **options: Any) -> Callable[[View], View]: ...

    def doc(self, **options: Any) -> Callable[[View], View]: ...


class JsonParser(FlaskParser):
    """webargs' parser, reading bodies as everything here does. What a schema says of unknown fields holds for a query
    too."""

    DEFAULT_UNKNOWN_BY_LOCATION = FlaskParser.DEFAULT_UNKNOWN_BY_LOCATION | {"query": None}

    def _raw_load_json(self, req: Request) -> Any:
        return json_content() if is_json_request(req) else core.missing


def json_content() -> Any:
    """The body's JSON. Raises what `content` does, also for too many values or levels of them."""
    limits, body = _settings().limits, content()
    check_values(body, limits)
    found = json_forms.parse(body)
    # Most bodies have too few brackets to be deep, and a prompt's tokens need not be looked at one by one.
    if body.count(b"[") + body.count(b"{") > limits.json_depth:
        check_depth(found, limits)
    return found


class _Blueprint(Blueprint):  # type: ignore[misc]
    """flask-smorest's, reading bodies within their limits."""

    ARGUMENTS_PARSER = JsonParser()


def services() -> Services:
    """Those of the application that serves this request."""
    found: Services = current_app.extensions[EXTENSION]
    return found


def blueprint(name: str, description: str, prefix: str = "/api/v1") -> Resource:
    """A blueprint whose routes are below `prefix`."""
    made: Resource = _Blueprint(name, __name__, url_prefix=prefix, description=description)
    return made


def credential(headers: Headers) -> str:
    """The key or token in X-API-Key or `Authorization: Bearer`. Raises Unauthorized where there is none."""
    found = headers.get("X-API-Key") or headers.get("Authorization", "").removeprefix("Bearer ")
    if not found:
        raise Unauthorized("no API key: send it in the X-API-Key header, or as `Authorization: Bearer`")
    return found


def current_caller() -> Caller:
    """The caller of the request at hand."""
    caller: Caller = g.caller
    return caller


def needs(*scopes: Scope) -> Callable[[View], View]:
    """Goes right below the route of whatever changes something: a key must have one of the scopes. Raises Forbidden."""

    def decorate(view: View) -> View:
        @wraps(view)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if current_caller().scopes.isdisjoint(scopes):
                raise Forbidden(f"this key may not do this: it takes a key with the scope {' or '.join(scopes)}")
            return view(*args, **kwargs)

        wrapped.scopes = scopes  # type: ignore[attr-defined]
        return cast(View, wrapped)

    return decorate


def at_most(size: int) -> Callable[[AnyView], AnyView]:
    """Answers 413 for a larger body, before it is parsed; goes right below the route."""
    return _limited(lambda: size)


def large(view: AnyView) -> AnyView:
    """Takes a body up to api.max_body_bytes: one with a batch or a prompt in it. Goes right below the route."""
    return _limited(lambda: _settings().api.max_body_bytes)(view)


def content() -> bytes:
    """The body, unpacked. Raises BadRequest, TooLarge, or 413 where it is over the route's limit."""
    most = request.max_content_length
    assert most is not None
    return unpack(request.get_data(), request.headers.get("Content-Encoding", ""), most)


def batch_content() -> bytes:
    """The body of a protobuf batch. Raises what `content` does, also for too many parts of it."""
    body = content()
    check_parts(body, _settings().limits)
    return body


def _limited(size: Callable[[], int]) -> Callable[[AnyView], AnyView]:
    def decorate(view: AnyView) -> AnyView:
        @wraps(view)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            request.max_content_length = size()
            return view(*args, **kwargs)

        return wrapped

    return decorate


def _settings() -> Settings:
    found: Settings = current_app.config[SETTINGS]
    return found
