"""Answers every error with a JSON body: {"detail": the message, "error": its kind}. Never empty, never a traceback.

Below OPENAI the body has the form that OpenAI's clients read: {"error": {"message", "type", "param", "code"}}. Below
ANTHROPIC it has the form of Anthropic's: {"type": "error", "error": {"type", "message"}, "request_id"}.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import redis
from flask import Flask, Response, request
from flask_smorest import Api
from werkzeug.exceptions import HTTPException

from app.api.schemas import ErrorSchema
from app.errors import STATE_SERVER_AWAY, BadRequest, InvalidToken, OpError, RequestError, Unavailable
from app.ids import CHECKPOINT_KINDS
from app.stores.redis.client import is_outage
from app.stores.redis.durability import NotDurable
from app.telemetry import ERRORS

log = logging.getLogger(__name__)
OPENAI, ANTHROPIC = "/oai/api/v1", "/anthropic"
Answer = tuple[dict[str, Any], int, dict[str, str]]
NOT_UNICODE = "a string in the JSON body contains half of a surrogate pair; send complete characters"
UNEXPECTED = "the server failed unexpectedly; its log has the cause"
_LONGEST_VALUE = 80
_MOST_COMPLAINTS = 20
_UNKNOWN_URL = "UnknownUrl"
_OPENAI_CODES = {
    "Unauthorized": "invalid_api_key",
    "InvalidToken": "invalid_api_key",
    "NotFound": "model_not_found",
    "BudgetSpent": "insufficient_quota",
    "TooManyRequests": "rate_limit_exceeded",
    _UNKNOWN_URL: "unknown_url",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Responses, embeddings, batches and other calls of these APIs. Their clients try a 5xx again, also a 501.
_SERVED = {
    OPENAI: "/completions, /chat/completions and /models",
    ANTHROPIC: "/v1/messages, /v1/messages/count_tokens and /v1/models",
}
_CHECKPOINT_WITHOUT_KIND = re.compile(f"/api/v1/training_runs/[^/]+/checkpoints/(?!({'|'.join(CHECKPOINT_KINDS)})/)")
_CHECKPOINT_IDS = "weights/NAME, sampler_weights/NAME or external_weights/NAME"
_RENAMED = {"UNPROCESSABLE_ENTITY": "UNPROCESSABLE_CONTENT", "Unprocessable Entity": "Unprocessable Content"}
_NAMELESS = ("json", "query", "_schema")


class TinsmithApi(Api):  # type: ignore[misc]
    """flask-smorest's Api with the error bodies of this API."""

    ERROR_SCHEMA = ErrorSchema

    def document(self) -> dict[str, Any]:
        """The OpenAPI document: the same on every Python. flask-smorest takes the names of statuses from Python, and
        3.13 renamed 422."""
        text = json.dumps(self.spec.to_dict())
        for earlier, later in _RENAMED.items():
            text = text.replace(later, earlier)
        found: dict[str, Any] = json.loads(text)
        return found

    def _openapi_json(self) -> Response:
        return Response(json.dumps(self.document()), mimetype="application/json")

    def handle_http_exception(self, error: HTTPException) -> Answer:
        served = _SERVED.get(_prefix())
        if error.code == 404 and served:
            message = f"{request.method} {request.path[:200]} is not served here; this server has {served}"
            return _answer(message, _UNKNOWN_URL, 404)
        if error.code in (404, 405) and _CHECKPOINT_WITHOUT_KIND.match(request.path):
            message = f"{request.method} {request.path[:200]} is not served: a checkpoint id is {_CHECKPOINT_IDS}"
            return _answer(message, error.name, error.code)
        return _answer(describe(error), error.name, error.code or 500)


def describe(error: HTTPException) -> str:
    """The message of an HTTP error, in one line. For a schema error it names the wrong fields, up to 20 of
    them, with their values."""
    messages = (getattr(error, "data", None) or {}).get("messages")
    if not messages:
        return error.description or error.name
    sources = {"json": _json(), "query": request.args}
    complaints = list(islice(_complaints(messages, sources), _MOST_COMPLAINTS + 1))
    more = "; and more" if len(complaints) > _MOST_COMPLAINTS else ""
    return "; ".join(complaints[:_MOST_COMPLAINTS]) + more


def _json() -> Any:
    """The JSON of the request; None where it cannot be read, and what is described is another error."""
    try:
        return request.get_json(silent=True)
    except (HTTPException, RequestError, RecursionError):
        return None


def register(app: Flask) -> None:
    """Registers the handlers of all errors except HTTPExceptions, which flask-smorest handles."""
    app.register_error_handler(RequestError, _request_error)
    app.register_error_handler(OpError, _op_error)
    app.register_error_handler(RecursionError, _too_deep)
    app.register_error_handler(UnicodeEncodeError, _not_unicode)
    app.register_error_handler(redis.RedisError, _state_server)
    app.register_error_handler(Exception, _unexpected)


def _answer(detail: str, kind: str, status: int, headers: Mapping[str, str] | None = None) -> Answer:
    ERRORS.labels(status, kind).inc()
    body = _FORMS.get(_prefix(), _plain)(detail, kind, status)
    # Anthropic's clients read the id from a header.
    more = {"request-id": body["request_id"]} if "request_id" in body else {}
    return body, status, {**(headers or {}), **more}


def _prefix() -> str:
    """The prefix of the request's path that has a form of its own; else empty."""
    return next((prefix for prefix in _FORMS if request.path.startswith(f"{prefix}/")), "")


def _plain(detail: str, kind: str, status: int) -> dict[str, Any]:
    return {"detail": detail, "error": kind}


def _openai(detail: str, kind: str, status: int) -> dict[str, Any]:
    error_type = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": detail, "type": error_type, "param": None, "code": _OPENAI_CODES.get(kind)}}


def _anthropic(detail: str, kind: str, status: int) -> dict[str, Any]:
    error_type = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error = {"type": error_type, "message": detail}
    return {"type": "error", "error": error, "request_id": new_request_id()}


def new_request_id() -> str:
    """A random id, by which a client's error is found in the log."""
    return f"req_{uuid.uuid4().hex}"


_FORMS = {OPENAI: _openai, ANTHROPIC: _anthropic}


def _request_error(error: RequestError) -> Answer:
    kind = type(error).__name__
    # huggingface_hub distinguishes a missing file from a missing model only by this header.
    headers = {"X-Error-Code": kind}
    if error.retry_after_s is not None:
        headers["Retry-After"] = f"{error.retry_after_s:.10g}"
    if isinstance(error, InvalidToken):
        # On this header the SDK gets another token and repeats the call.
        headers["WWW-Authenticate"] = 'Bearer error="invalid_token"'
    return _answer(str(error) or kind, kind, error.status, headers)


def _op_error(error: OpError) -> Answer:
    """The answer of a call that waits for its Op, equal to the answer of a poll."""
    return _answer(str(error), type(error).__name__, 400 if error.category == "user" else 500)


def _too_deep(_: RecursionError) -> Answer:
    return _request_error(BadRequest("the JSON body is nested too deeply"))


def _not_unicode(_: UnicodeEncodeError) -> Answer:
    return _request_error(BadRequest(NOT_UNICODE))


def _state_server(error: redis.RedisError) -> Answer | HTTPException:
    if not is_outage(error):
        return _unexpected(error)
    log.warning("the state server failed: %s", type(error).__name__)
    if isinstance(error, NotDurable):
        return _request_error(Unavailable(str(error)))
    return _request_error(Unavailable(STATE_SERVER_AWAY))


def _unexpected(error: Exception) -> Answer | HTTPException:
    if isinstance(error, HTTPException):
        return error
    body, status, headers = _answer(UNEXPECTED, "InternalServerError", 500)
    named = {"request_id": body["request_id"]} if "request_id" in body else None
    log.error("unexpected error", exc_info=error, extra=named)
    return body, status, headers


def _complaints(messages: Any, value: Any, path: str = "") -> Iterator[str]:
    if isinstance(messages, Mapping):
        for key, inner in messages.items():
            inner_path = path if key in _NAMELESS else f"{path}.{key}".lstrip(".")
            yield from _complaints(inner, _part(value, key), inner_path)
    else:
        got = "" if value is None or isinstance(value, dict | list) else f" (got {_short(value)})"
        yield f"{path}: {' '.join(map(str, messages))}{got}".lstrip(": ")


def _short(value: Any) -> str:
    return repr(value[:_LONGEST_VALUE] if isinstance(value, str) else value)[:_LONGEST_VALUE]


def _part(value: Any, key: Any) -> Any:
    try:
        return value[key]
    except (KeyError, IndexError, TypeError):
        return None
