"""The base of the routes for OpenAI's and Anthropic's clients: fields, and answers as a whole or as server-sent events.

An unknown field in a body is an error.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from flask import Response, copy_current_request_context, current_app, request
from marshmallow import RAISE, Schema, ValidationError, fields, pre_load, validate

from app.api import errors
from app.api.schemas import identifier
from app.services.openai.service import Answer
from app.services.openai.streaming import Gone

_STREAMED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

MAX_SEED = 2**63 - 1
MAX_MESSAGES = 4096
MAX_TOOLS = 512
MAX_FIELDS = 100
"""Most fields of an object, known or not."""


class Ignored(fields.Field[Any]):
    """A field that does not change the answer: labels, caching and billing."""


class Unsupported(fields.Field[Any]):
    """An unsupported field. It refuses every value that would change the answer; `neutral` values are accepted."""

    def __init__(self, *neutral: Any) -> None:
        super().__init__(load_default=None)
        self._neutral = neutral

    def _deserialize(self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any) -> Any:
        if value not in self._neutral:
            raise ValidationError("Not supported here; leave it out.")
        return None


class Counted(Schema):
    """An object without unknown fields. One with too many fields gets one error, not one for each field."""

    class Meta:
        unknown = RAISE

    @pre_load
    def count_fields(self, data: Any, **_: Any) -> Any:
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise ValidationError(f"Has {len(data)} fields; at most {MAX_FIELDS} are allowed.")
        return data


class Nullable(Counted):
    """An object in which a field that is null counts as left out."""

    @pre_load
    def leave_nulls_out(self, data: Any, **_: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class Sampled(Nullable):
    """The fields of every call that samples."""

    model = identifier()
    seed = fields.Integer(strict=True, load_default=None, validate=validate.Range(0, MAX_SEED))
    stream = fields.Boolean(load_default=False)
    return_token_ids = fields.Boolean(load_default=False)
    temperature = fields.Float(load_default=1.0, validate=validate.Range(0, 2))
    top_p = fields.Float(load_default=1.0, validate=validate.Range(0, 1, min_inclusive=False))


def answered(
    answer: Answer, event: Callable[[Mapping[str, Any]], str], *, stream: bool, end: str = ""
) -> Response | dict[str, Any]:
    """The answer of a view. A stream has an `event` for each chunk, and then `end`."""
    if stream:
        events = _events(answer.chunks(), event, end, copy_current_request_context(_failure))
        response = Response(events, mimetype="text/event-stream", headers=_STREAMED)
        # `close` is called even if nothing of the response was read.
        response.call_on_close(answer.close)
        return response
    try:
        return answer.whole()
    finally:
        answer.close()


def _events(
    chunks: Iterator[dict[str, Any]],
    event: Callable[[Mapping[str, Any]], str],
    end: str,
    failure: Callable[[Exception], Mapping[str, Any]],
) -> Iterator[str]:
    """The chunks as server-sent events. After the status is sent, an error can only be an event; the client raises
    it."""
    try:
        for chunk in chunks:
            yield event(chunk)
    except Exception as error:
        yield event(failure(error))
    else:
        yield end


def _failure(error: Exception) -> Mapping[str, Any]:
    body, *_ = cast(errors.Answer, current_app.handle_user_exception(error))
    return body


def gone() -> Gone:
    """The check for this request. It needs a server that shows the connection (gunicorn does)."""
    connection: socket.socket | None = request.environ.get("gunicorn.socket")

    def is_closed() -> bool:
        if connection is None:
            return False
        readable = select.poll()
        readable.register(connection, select.POLLIN)
        try:
            return bool(readable.poll(0)) and connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    return is_closed
