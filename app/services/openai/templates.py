"""Chat templates, rendered in jinja2's sandbox with what transformers gives them."""

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


def compile_template(text: str) -> Template:
    """Raises jinja2.TemplateError when `text` is no template."""
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
    """A conversation up to where the assistant speaks; `tokens`: special ones by name. Raises BadRequest for what the
    template refuses."""
    try:
        return template.render(messages=messages, tools=tools, documents=None, add_generation_prompt=True, **tokens)
    except (TemplateError, TypeError, LookupError, AttributeError, ValueError, ArithmeticError) as error:
        raise BadRequest(f"the model's chat template cannot take these messages: {str(error)[:300]}") from None


class _Generation(Extension):
    """`{% generation %}` marks what the assistant says, for training on it; here its content is all that counts."""

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
    """jinja2's own escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
