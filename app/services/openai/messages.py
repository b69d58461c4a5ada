"""A conversation as OpenAI's clients send it, in the form chat templates are written for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from app.errors import BadRequest

_KEPT = ("name", "tool_call_id", "reasoning_content")


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parts of a text are joined by line breaks, and a tool call's arguments are an object. Raises BadRequest for parts
    that are no text, naming the message."""
    return [_message(message, f"messages.{place}") for place, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = "system" if message["role"] == "developer" else message["role"]
    kept = {name: message[name] for name in _KEPT if message.get(name) is not None}
    calls = message.get("tool_calls")
    more = {"tool_calls": [_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(calls)]} if calls else {}
    return {"role": role, "content": _text(message["content"], f"{where}.content"), **kept, **more}


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a text or a list of parts")
    return "\n".join(_part(part, f"{where}.{place}") for place, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise BadRequest(f"{where} is of type {str(kind)[:40]!r}; only text is supported")
    return text


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where} must hold a function with a name")
    arguments = function.get("arguments") or "{}"
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        raise BadRequest(f"{where}.function.arguments is not valid JSON") from None
    return {**call, "function": {**function, "arguments": parsed}}
