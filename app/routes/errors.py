"""Every error as a JSON body: {"detail": what is wrong, "error": its kind}. Never empty, never a traceback."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import redis
from flask import Flask, request
from flask_smorest import Api
from werkzeug.exceptions import HTTPException

from app.errors import BadRequest, RequestError, Unavailable
from app.schemas.base import ErrorSchema
from app.stores.redis.client import is_outage

log = logging.getLogger(__name__)
Answer = tuple[dict[str, str], int, dict[str, str]]
_LONGEST_VALUE = 80
_NAMELESS = ("json", "query", "_schema")


class TinsmithApi(Api):  # type: ignore[misc]
    """flask-smorest with our error bodies."""

    ERROR_SCHEMA = ErrorSchema

    def handle_http_exception(self, error: HTTPException) -> Answer:
        return {"detail": describe(error), "error": error.name}, error.code or 500, {}


def describe(error: HTTPException) -> str:
    """One line; for a schema's complaint every field with the value it got."""
    messages = (getattr(error, "data", None) or {}).get("messages")
    if not messages:
        return error.description or error.name
    sources = {"json": request.get_json(silent=True), "query": request.args}
    return "; ".join(_complaints(messages, sources))


def register(app: Flask) -> None:
    """HTTPExceptions are flask-smorest's; these are the rest."""
    app.register_error_handler(RequestError, _request_error)
    app.register_error_handler(RecursionError, _too_deep)
    app.register_error_handler(UnicodeEncodeError, _not_unicode)
    app.register_error_handler(redis.RedisError, _state_server)
    app.register_error_handler(Exception, _unexpected)


def _request_error(error: RequestError) -> Answer:
    headers = {} if error.retry_after_s is None else {"Retry-After": f"{error.retry_after_s:g}"}
    return {"detail": str(error) or type(error).__name__, "error": type(error).__name__}, error.status, headers


def _too_deep(_: RecursionError) -> Answer:
    return _request_error(BadRequest("the JSON body is nested too deeply"))


def _not_unicode(_: UnicodeEncodeError) -> Answer:
    return _request_error(BadRequest("a text in the JSON body holds half of a surrogate pair"))


def _state_server(error: redis.RedisError) -> Answer | HTTPException:
    if not is_outage(error):
        return _unexpected(error)
    log.warning("the state server failed: %s", type(error).__name__)
    return _request_error(Unavailable("the state server is away or full; try again soon"))


def _unexpected(error: Exception) -> Answer | HTTPException:
    if isinstance(error, HTTPException):
        return error
    log.error("unexpected error", exc_info=error)
    return {"detail": "the server failed; its log says why", "error": "InternalServerError"}, 500, {}


def _complaints(messages: Any, value: Any, path: str = "") -> Iterator[str]:
    if isinstance(messages, Mapping):
        for key, inner in messages.items():
            inner_path = path if key in _NAMELESS else f"{path}.{key}".lstrip(".")
            yield from _complaints(inner, _part(value, key), inner_path)
    else:
        got = "" if value is None or isinstance(value, dict | list) else f" (got {repr(value)[:_LONGEST_VALUE]})"
        yield f"{path}: {' '.join(map(str, messages))}{got}".lstrip(": ")


def _part(value: Any, key: Any) -> Any:
    try:
        return value[key]
    except (KeyError, IndexError, TypeError):
        return None
