"""Chat templates: converts conversations to the templates' form, and renders them in jinja2's sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.errors import BadRequest

_KEPT = ("name", "tool_call_id", "reasoning_content")


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
    tokens: Mapping[str, str],
) -> str:
    """The text of a conversation, up to the point where the assistant answers. `tokens`: special tokens by name. Raises
    BadRequest for messages that the template refuses."""
    try:
        return template.render(messages=messages, tools=tools, documents=None, add_generation_prompt=True, **tokens)
    except (TemplateError, TypeError, LookupError, AttributeError, ValueError, ArithmeticError) as error:
        raise BadRequest(f"the model's chat template cannot take these messages: {str(error)[:300]}") from None


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
    """The messages in the templates' form: text parts are joined by line breaks, and a tool call's arguments become an
    object. Raises BadRequest for parts that are not text, and names the message."""
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
