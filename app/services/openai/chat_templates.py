"""Chat templates in jinja2's sandbox, and messages in the form that templates take."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.errors import BadRequest

RENDERED = ("messages", "tools", "documents", "add_generation_prompt")
"""The variables of a template that every conversation has."""
_KEPT = ("name", "tool_call_id")
_IMAGE = {"type": "image"}
"""An image in a message, as chat templates take it."""
_PARSED = "parsed_arguments"
"""The field that OpenAI's client adds to a call beside its `arguments`; templates may write a function as a whole."""
_SHORT_IDS = "length != 9"
"""The rule of Mistral's templates that refuses the ids of OpenAI and Anthropic, which are longer."""


def compile_template(text: str) -> Template:
    """The compiled template. Raises jinja2.TemplateError when `text` is not a valid template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment.from_string(text)


def render(
    template: Template,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> str:
    """The text of a conversation, up to the point where the assistant answers. `variables`: special tokens by name, and
    variables of the caller. Raises BadRequest for messages that the template refuses."""
    own = (messages, tools, None, True)
    try:
        return template.render({**variables, **dict(zip(RENDERED, own, strict=True))})
    except (TemplateError, TypeError, LookupError, AttributeError, ValueError, ArithmeticError) as error:
        raise BadRequest(f"the model's chat template cannot take these messages: {str(error)[:300]}") from None


def fit_call_ids(messages: Sequence[Mapping[str, Any]], text: str) -> Sequence[Mapping[str, Any]]:
    """The messages, with ids of tool calls that the template with this text takes."""
    return [_with_short_ids(message) for message in messages] if _SHORT_IDS in text else messages


def _with_short_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with ids of tool calls of 9 characters. A call and its result get the same one."""
    short = dict(message)
    if "tool_calls" in message:
        short["tool_calls"] = [
            {**call, "id": _short_id(call["id"])} if isinstance(call.get("id"), str) else call
            for call in message["tool_calls"]
        ]
    if "tool_call_id" in message:
        short["tool_call_id"] = _short_id(message["tool_call_id"])
    return short


def _short_id(given: str) -> str:
    return given if len(given) == 9 else hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:9]


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training. Here only the tag's content is
    rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON text without HTML escapes. jinja2's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages in the templates' form: line breaks join text parts that follow each other, an image is a part
    without its file, and a tool call's arguments become an object. Raises BadRequest for other parts, and names the
    message."""
    return [_message(message, f"messages.{place}") for place, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = "system" if message["role"] == "developer" else message["role"]
    kept = {name: message[name] for name in _KEPT if message.get(name) is not None}
    calls = message.get("tool_calls")
    more = {"tool_calls": [_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(calls)]} if calls else {}
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    more |= {"reasoning_content": thoughts} if thoughts else {}
    return {"role": role, "content": _content(message["content"], f"{where}.content"), **kept, **more}


def _content(content: Any, where: str) -> str | list[dict[str, str]]:
    """A text, or with images a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a text or a list of parts")
    parts = [_part(part, f"{where}.{place}") for place, part in enumerate(content)]
    if _IMAGE not in parts:
        return _joined(parts)
    joined: list[dict[str, str]] = []
    for is_image, group in groupby(parts, key=_IMAGE.__eq__):
        found = list(group)
        joined += found if is_image else [{"type": "text", "text": _joined(found)}]
    return joined


def _joined(parts: Iterable[Mapping[str, str]]) -> str:
    return "\n".join(part["text"] for part in parts)


def _part(part: Any, where: str) -> dict[str, str]:
    if isinstance(part, dict) and part.get("type") == "image_url":
        return _IMAGE
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise BadRequest(f"{where} is of type {str(kind)[:40]!r}; only text and image_url are supported")
    return {"type": "text", "text": text}


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where} must hold a function with a name")
    arguments = function.get("arguments") or "{}"
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        raise BadRequest(f"{where}.function.arguments is not valid JSON") from None
    kept = {name: value for name, value in function.items() if name != _PARSED}
    return {**call, "function": {**kept, "arguments": parsed}}
