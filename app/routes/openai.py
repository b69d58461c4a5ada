"""Completions and chats for OpenAI's clients, whole or as server-sent events."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from flask import Response, copy_current_request_context, current_app, request

from app.auth import current_caller, needs
from app.routes import errors
from app.routes.bodies import large
from app.routes.context import blueprint as make
from app.routes.context import services
from app.schemas.openai import ChatCompletion, Completion
from app.services.openai.service import Answer

blueprint = make("openai", "OpenAI-compatible calls", prefix=errors.OPENAI)
_STREAMED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@blueprint.route("/completions", methods=["POST"])
@needs("sample")
@large
@blueprint.arguments(Completion(), error_status_code=400)
@blueprint.response(200, description="A text_completion; with `stream`, its chunks as server-sent events")
def completions(asked: dict[str, Any]) -> Response | dict[str, Any]:
    """Go on with a text, or with tokens."""
    return _answered(services().openai.complete(current_caller(), asked, _gone()), asked)


@blueprint.route("/chat/completions", methods=["POST"])
@needs("sample")
@large
@blueprint.arguments(ChatCompletion(), error_status_code=400)
@blueprint.response(200, description="A chat.completion; with `stream`, its chunks as server-sent events")
def chat_completions(asked: dict[str, Any]) -> Response | dict[str, Any]:
    """Answer in a conversation, by the model's chat template."""
    return _answered(services().openai.chat(current_caller(), asked, _gone()), asked)


@blueprint.route("/models", methods=["GET"])
@blueprint.response(200, description="A list of model objects")
def models() -> dict[str, Any]:
    """The base models that can be sampled now, and one's own sampler checkpoints."""
    return {"object": "list", "data": services().openai.models(current_caller())}


def _answered(answer: Answer, asked: Mapping[str, Any]) -> Response | dict[str, Any]:
    if asked["stream"]:
        chunks = answer.chunks(with_usage=asked["stream_options"]["include_usage"])
        events = _events(chunks, copy_current_request_context(_failure))
        response = Response(events, mimetype="text/event-stream", headers=_STREAMED)
        # Called even if nothing was read of it.
        response.call_on_close(answer.close)
        return response
    try:
        return answer.whole()
    finally:
        answer.close()


def _events(chunks: Iterator[dict[str, Any]], failure: Callable[[Exception], Mapping[str, Any]]) -> Iterator[str]:
    """With the status sent, an error can only be an event; the client raises it."""
    try:
        for chunk in chunks:
            yield _event(chunk)
    except Exception as error:
        yield _event(failure(error))
    else:
        yield "data: [DONE]\n\n"


def _failure(error: Exception) -> Mapping[str, Any]:
    body, *_ = cast(errors.Answer, current_app.handle_user_exception(error))
    return body


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _gone() -> Callable[[], bool]:
    """Tells whether the client of this request has closed its connection, where the server shows it (gunicorn does)."""
    connection: socket.socket | None = request.environ.get("gunicorn.socket")

    def gone() -> bool:
        if connection is None:
            return False
        readable = select.poll()
        readable.register(connection, select.POLLIN)
        try:
            return bool(readable.poll(0)) and connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    return gone
