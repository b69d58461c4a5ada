"""The arguments of tool calls that a model writes as plain text. The JSON schema of a tool gives their types."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

Kinds = frozenset[str]
"""The types that a schema allows; empty if it does not say."""
Declared = Mapping[str, Mapping[str, Kinds]]
"""The types of parameters, by tool and by parameter."""

_KINDS: Mapping[type, frozenset[str]] = {
    dict: frozenset({"object"}),
    list: frozenset({"array"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    bool: frozenset({"boolean"}),
    type(None): frozenset({"null"}),
}
# Templates of Qwen3-Coder write Python's words for these values.
_WORDS = {"True": "true", "False": "false", "None": "null"}


def declared(tools: Sequence[Mapping[str, Any]]) -> Declared:
    """The types that tools in OpenAI's form declare. A client may send any JSON as a schema.

    Each schema is read once, and not for each argument of an answer: both may have thousands of parts.
    """
    functions = [_object(tool.get("function")) for tool in tools]
    return {str(function.get("name")): _parameters(function) for function in functions}


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Kinds]:
    properties = _object(_object(function.get("parameters")).get("properties"))
    return {name: _kinds(schema) for name, schema in properties.items()}


def read_value(text: str, kinds: Kinds) -> Any:
    """The value of an argument: JSON, or the text itself where it may be a string. Raises ValueError for text that is
    neither JSON nor a string by its types."""
    text = text.removeprefix("\n").removesuffix("\n")
    if kinds == {"string"}:
        return text
    try:
        found = json.loads(_WORDS.get(text, text))
    except ValueError:
        if kinds and "string" not in kinds:
            raise
        return text
    own = _KINDS.get(type(found))
    return text if own is None or ("string" in kinds and not own & kinds) else found


def _kinds(schema: Any) -> Kinds:
    schema = _object(schema)
    given = schema.get("type")
    own = frozenset(kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str))
    choices = [schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)]
    return own.union(*(_kinds(choice) for choice in chain(*choices)))


def _object(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}
