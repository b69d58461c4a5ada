"""The body of the request at hand: how large it may be, and reading it as bytes or as JSON."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from flask import Request, current_app, request
from webargs import core
from webargs.flaskparser import FlaskParser, is_json_request

from app.limits import check_depth, check_parts, check_values, unpack
from app.settings import Settings
from app.wire import json_bodies

SETTINGS = "TINSMITH_SETTINGS"
"""Where an application's config has its settings: what a blueprint is made of can not wait for the services."""
View = Callable[..., Any]


def at_most(size: int) -> Callable[[View], View]:
    """Answers 413 for a larger body, before it is parsed; goes right below the route."""
    return _limited(lambda: size)


def large(view: View) -> View:
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


def json_content() -> Any:
    """The body's JSON. Raises what `content` does, also for too many values or levels of them."""
    limits, body = _settings().limits, content()
    check_values(body, limits)
    found = json_bodies.parse(body)
    # Most bodies have too few brackets to be deep, and a prompt's tokens need not be looked at one by one.
    if body.count(b"[") + body.count(b"{") > limits.json_depth:
        check_depth(found, limits)
    return found


class JsonParser(FlaskParser):
    """webargs' parser, reading bodies as everything here does. What a schema says of unknown fields holds for a query
    too."""

    DEFAULT_UNKNOWN_BY_LOCATION = FlaskParser.DEFAULT_UNKNOWN_BY_LOCATION | {"query": None}

    def _raw_load_json(self, req: Request) -> Any:
        return json_content() if is_json_request(req) else core.missing


def _limited(size: Callable[[], int]) -> Callable[[View], View]:
    def decorate(view: View) -> View:
        @wraps(view)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            request.max_content_length = size()
            return view(*args, **kwargs)

        return wrapped

    return decorate


def _settings() -> Settings:
    found: Settings = current_app.config[SETTINGS]
    return found
