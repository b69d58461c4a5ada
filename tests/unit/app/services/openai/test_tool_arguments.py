"""Arguments that a model writes as plain text, read by the types that the tool declares."""

from __future__ import annotations

from typing import Any

import pytest

from app.services.openai.tool_arguments import declared, read_value

STRING, OPTIONAL = {"type": "string"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}
VALUES = [
    ("5", STRING, "5"),
    ("\n a\n\nb \n", STRING, " a\n\nb "),
    ("null", STRING, "null"),
    ('"a"', STRING, '"a"'),
    ("", STRING, ""),
    ("[" * 100_000, STRING, "[" * 100_000),
    ("5", OPTIONAL, "5"),
    ("null", OPTIONAL, None),
    ("None", {"type": ["string", "null"]}, None),
    ('{"a": 1}', OPTIONAL, '{"a": 1}'),
    ("5", {"type": ["string", "number"]}, 5),
    ("\n5\n", {"type": "integer"}, 5),
    ("5", {"type": "number"}, 5),
    ("True", {"type": "boolean"}, True),
    ("false", {"type": "boolean"}, False),
    ("[1, 2]", {"type": "array"}, [1, 2]),
    ('{"a": "b"}', {"type": "object"}, {"a": "b"}),
    ("5", {}, 5),
    ("five", {}, "five"),
    ('"five"', {}, '"five"'),
    ("five", None, "five"),
    ("five", {"type": 5, "anyOf": 5, "oneOf": [5]}, "five"),
]


@pytest.mark.parametrize(("text", "schema", "value"), VALUES, ids=range(len(VALUES)))
def test_a_value_has_the_type_that_the_tool_declares(text: str, schema: Any, value: Any):
    found = read_value(text, kinds_of(schema))
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("kind", ["integer", "number", "boolean", "array", "object", "null"])
def test_text_that_is_neither_json_nor_a_string_is_no_value(kind: str):
    with pytest.raises(ValueError):
        read_value("some text", kinds_of({"type": kind}))


@pytest.mark.parametrize("tool", [{}, {"function": 5}, {"function": {"name": ["f"], "parameters": {"properties": 5}}}])
def test_tools_of_any_json_declare_what_they_declare(tool: dict[str, Any]):
    assert declared([tool, tool_with(STRING)])["f"] == {"x": {"string"}}


def tool_with(schema: Any) -> dict[str, Any]:
    return {"function": {"name": "f", "parameters": {"properties": {"x": schema}}}}


def kinds_of(schema: Any) -> frozenset[str]:
    return declared([tool_with(schema)])["f"]["x"]
