"""JSON schemas that answers may follow."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from app.errors import BadRequest
from app.services.openai.json_schema import (
    COSTLY_FORMATS,
    MAX_BYTES,
    MAX_COSTLY,
    MAX_DEPTH,
    MAX_ITEMS,
    MAX_OPEN_BYTES,
    MAX_OPEN_NAMES,
    MAX_PARTS,
    MAX_PROPERTIES,
    MAX_RULES,
    MAX_VALUES,
    checked_schema,
)

TEXT = {"type": "string"}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = dict(TEXT)
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def record(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": TEXT for i in range(count)}}


def open_record(*names: str) -> dict[str, Any]:
    return {"type": "object", "properties": dict.fromkeys(names, TEXT), "additionalProperties": TEXT}


def tuple_of(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "prefixItems": list(parts)}


GOOD: dict[str, dict[str, Any]] = {
    "anything": {},
    "a record": {**record(2), "required": ["p0"], "additionalProperties": False, "title": "R", "description": "d"},
    "a map": {"type": "object", "additionalProperties": {"type": ["integer", "null"], "minimum": 0, "maximum": 9}},
    "a list": {"type": "array", "items": {"enum": ["a", 1, None]}, "minItems": 1, "maxItems": 3},
    "a definition": {"$defs": {"t": TEXT}, "type": "array", "items": {"$ref": "#/$defs/t", "description": "d"}},
    "a choice": {"anyOf": [{"const": {"a": [1]}}, {"type": "string", "format": "date"}], "$schema": "x"},
    "definitions in line": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/c"}]}, "b": TEXT, "c": nested(1)},
    },
    "values of a type": {"type": ["integer", "boolean", "null"], "enum": [1, True, None], "title": "t"},
    "a number's value": {"type": "number", "const": 1},
    "one whole number": {"type": "integer", "exclusiveMinimum": 4, "exclusiveMaximum": 6},
    "one number": {"type": "number", "minimum": 0.1, "maximum": 0.1},
    "the narrowest range": {"type": "number", "exclusiveMinimum": 5, "exclusiveMaximum": 5.000002},
    "a tuple and more": {**tuple_of(TEXT, TEXT), "items": TEXT, "minItems": 3, "maxItems": 4},
    "a tuple's length": {**tuple_of(TEXT, TEXT), "minItems": 2, "maxItems": 2},
    "the longest open names": open_record("é" * (MAX_OPEN_BYTES // 2)),
    "the most open names": open_record(*(f"{i}" for i in range(MAX_OPEN_NAMES))),
    "the deepest": nested(MAX_DEPTH),
    "the widest": record(MAX_PROPERTIES),
}
BAD: dict[str, tuple[Any, str]] = {
    "a list instead": ([], "schema must be an object"),
    "a pattern": ({"type": "string", "pattern": "(a+)+$"}, "'pattern' is not supported"),
    "a length": ({"type": "string", "maxLength": 5}, "'maxLength' is not supported"),
    "a reference elsewhere": ({"$ref": "https://example.com/s.json"}, "schema.$ref has a value"),
    "a missing definition": ({"$ref": "#/$defs/a", "$defs": {"b": TEXT}}, "names 'a'"),
    "inner definitions": ({"type": "array", "items": {"$defs": {}}}, "'$defs' is not supported"),
    "a definition of itself": ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "back to itself"),
    "a tree": (
        {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
        "$defs.a leads back",
    ),
    "definitions in a list": ({"$defs": []}, "schema.$defs must"),
    "a type of its own": ({"type": "date"}, "schema.type has a value"),
    "no type": ({"properties": {"a": TEXT}}, "schema.properties needs the type object"),
    "a rule beside a reference": ({"$ref": "#/$defs/a", "type": "string", "$defs": {"a": TEXT}}, "beside $ref only"),
    "a rule beside a choice": ({"anyOf": [TEXT], "type": "string"}, "beside anyOf only"),
    "a property that never fits": ({"type": "object", "properties": {"a": False}}, "properties.a must be an object"),
    "a required stranger": ({**record(1), "required": ["b"]}, "required names 'b'"),
    "no values": ({"enum": []}, "schema.enum has a value"),
    "no choice": ({"anyOf": []}, "schema.anyOf has a value"),
    "a count below zero": ({"type": "array", "minItems": -1}, "schema.minItems"),
    "a count of yes": ({"type": "array", "minItems": True}, "schema.minItems"),
    "more than most": ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems 3 is above maxItems 2"),
    "an empty range": (
        {"type": "number", "exclusiveMinimum": 2, "maximum": 1},
        "no number lies within exclusiveMinimum 2, maximum 1",
    ),
    "no whole number between": (
        {"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 6},
        "no number lies within exclusiveMaximum 6, exclusiveMinimum 5",
    ),
    "no number below itself": ({"type": "number", "minimum": 5, "exclusiveMaximum": 5}, "no number lies within"),
    "no number that is written": (
        {"type": "number", "exclusiveMinimum": 5, "exclusiveMaximum": 5.000001},
        "no number lies within",
    ),
    "a fine number": ({"type": "number", "minimum": 0.1234567}, "at most 6 decimals"),
    "a bound of anything": ({"minimum": 5}, "schema.minimum needs the type integer or number"),
    "a bound of values": ({"type": "integer", "enum": [1], "maximum": 5}, "beside enum only remarks and type"),
    "values and a value": ({"enum": [1], "const": 1}, "beside enum only"),
    "a format of a value": ({"type": "string", "const": "a", "format": "date"}, "beside const only"),
    "values of another type": ({"type": "integer", "enum": [1, "a"]}, 'the value "a", which is not of its type'),
    "a value of another type": ({"type": ["integer", "null"], "const": True}, "the value true"),
    "fewer than the first": ({**tuple_of(TEXT, TEXT), "maxItems": 1}, "maxItems 1 is below"),
    "more than the first": ({**tuple_of(TEXT), "minItems": 2}, "need items"),
    "a length of anything": ({"type": "array", "maxItems": 2}, "need items"),
    "a path to a definition": ({"$ref": "#/$defs/a/b", "$defs": {"a/b": TEXT}}, "has a name with '/'"),
    "a type of types": ({"type": [["string"]]}, "schema.type has a value"),
    "a huge number": ({"type": "number", "maximum": 1e300}, "schema.maximum"),
    "no number": ({"const": float("nan")}, "holds NaN"),
    "half a number": ({"type": ["null", "integer"], "minimum": 0.5}, "must be a whole number"),
    "too deep": (nested(MAX_DEPTH + 1), f"more than {MAX_DEPTH} levels"),
    "too wide": ({"type": "array", "prefixItems": [record(60), record(60)]}, f"more than {MAX_PROPERTIES} properties"),
    "too many values": ({"enum": list(range(MAX_VALUES + 1))}, f"more than {MAX_VALUES} enum values"),
    "too many parts": ({"anyOf": [TEXT] * MAX_PARTS}, f"more than {MAX_PARTS} parts"),
    "too long": ({"type": "array", "maxItems": MAX_ITEMS + 1}, f"more than {MAX_ITEMS} items"),
    "too many bounds": (
        {"type": "array", "prefixItems": [{"type": "number", "minimum": 0}] * (MAX_RULES + 1)},
        f"more than {MAX_RULES} formats and bounds",
    ),
    "too many costly formats": (
        tuple_of(*({"type": "string", "format": COSTLY_FORMATS[i % 3]} for i in range(MAX_COSTLY + 1))),
        f"more than {MAX_COSTLY} formats {', '.join(COSTLY_FORMATS)}",
    ),
    "too many open names": (
        tuple_of(*(open_record("ab", "cd") for _ in range(MAX_OPEN_NAMES))),
        f"more than {MAX_OPEN_NAMES} property names beside additionalProperties",
    ),
    "too long open names": (
        {**open_record("é" * (MAX_OPEN_BYTES // 2), "a"), "additionalProperties": True},
        f"more than {MAX_OPEN_BYTES} bytes of property names",
    ),
    "too large": ({"const": "a" * MAX_BYTES}, f"at most {MAX_BYTES}"),
}


OF_ANOTHER_KIND: dict[str, tuple[str, Any]] = {
    "properties": ("object", []),
    "required": ("object", [1]),
    "additionalProperties": ("object", "no"),
    "items": ("array", []),
    "prefixItems": ("array", {}),
    "maxItems": ("array", 1.5),
    "enum": ("string", "a"),
    "format": ("string", "phone"),
    "minimum": ("number", "1"),
    "maximum": ("number", True),
    "exclusiveMinimum": ("number", None),
    "exclusiveMaximum": ("number", [1]),
    "$schema": ("number", 1),
    "title": ("number", 1),
    "description": ("number", None),
}


@pytest.mark.parametrize("keyword", OF_ANOTHER_KIND)
def test_a_value_that_a_keyword_does_not_take_is_a_bad_request(keyword: str):
    kind, value = OF_ANOTHER_KIND[keyword]
    with pytest.raises(BadRequest, match=rf"schema\.{re.escape(keyword)} has a value"):
        checked_schema({"type": kind, keyword: value}, "schema")


@pytest.mark.parametrize("case", GOOD)
def test_a_schema_is_kept_as_it_is(case: str):
    assert json.loads(checked_schema(GOOD[case], "schema")) == GOOD[case]


@pytest.mark.parametrize("case", BAD)
def test_a_schema_that_no_grammar_follows_cheaply_is_a_bad_request_that_names_the_place(case: str):
    schema, named = BAD[case]
    with pytest.raises(BadRequest) as refused:
        checked_schema(schema, "schema")
    assert named in str(refused.value)
