"""Every JSON schema that the API accepts compiles into a grammar, at a bounded cost, and the grammar follows it."""

from __future__ import annotations

import json
import time
from itertools import product
from typing import Any

import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from app.errors import BadRequest
from app.services.openai.json_schema import (
    COSTLY_FORMATS,
    MAX_COSTLY,
    MAX_OPEN_BYTES,
    MAX_OPEN_NAMES,
    MAX_PROPERTIES,
    MAX_RULES,
    checked_schema,
)

VALUES = [None, True, -1, 0, 1, 5, 6, 100, 0.5, 5.5, "a", "b", [], [1], ["a"], ["a", "b"], [1, 5, "a"], {}]
VALUES += [{"a": 1}, {"b": "a"}, {"a": "b", "b": 5}]
BYTES = [bytes([i]) for i in range(256)]
NUMBERS = st.sampled_from([-1, 0, 0.5, 1, 5, 5.000001, 6])
COUNTS = st.integers(0, 3)
TYPES = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null"])
LEAVES: dict[str, st.SearchStrategy[Any]] = {
    "type": TYPES | st.lists(TYPES, min_size=1, max_size=2, unique=True),
    "minimum": NUMBERS,
    "maximum": NUMBERS,
    "exclusiveMinimum": NUMBERS,
    "exclusiveMaximum": NUMBERS,
    "minItems": COUNTS,
    "maxItems": COUNTS,
    "enum": st.lists(st.sampled_from(VALUES), min_size=1, max_size=2),
    "const": st.sampled_from(VALUES),
    "format": st.sampled_from(["date", "uri"]),
    "required": st.lists(st.sampled_from("ab"), max_size=2),
    "title": st.just("t"),
}
KINDS = {
    "integer": ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum"],
    "number": ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const"],
    "string": ["format", "enum", "const"],
    "array": ["items", "prefixItems", "minItems", "maxItems"],
    "object": ["properties", "required", "additionalProperties"],
}


def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas with parts of their type's keywords, or with any keywords at all."""
    keywords = {
        **LEAVES,
        "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
        "additionalProperties": inner | st.booleans(),
        "anyOf": st.lists(inner, min_size=1, max_size=2),
    }
    of_types = [
        st.fixed_dictionaries({"type": st.just(kind)}, optional={name: keywords[name] for name in names})
        for kind, names in KINDS.items()
    ]
    anything = st.lists(st.sampled_from(sorted(keywords)), max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: keywords[name] for name in names})
    )
    defined = st.sampled_from(["a", "a/b", "a~b"]).flatmap(
        lambda name: st.fixed_dictionaries({"$ref": st.just(f"#/$defs/{name}"), "$defs": st.just({name: {}})})
    )
    return st.one_of(*of_types, anything, defined)


SCHEMAS = st.recursive(st.fixed_dictionaries({}, optional={"type": TYPES}), around, max_leaves=4)


def compiled(schema: Any, vocabulary: list[bytes]) -> xgrammar.CompiledGrammar:
    """The grammar, compiled as vLLM compiles it."""
    info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[0])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    return compiler.compile_json_schema(json.dumps(schema), any_whitespace=False, separators=(",", ":"))


def allows(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    return matcher.accept_string(text) and matcher.is_terminated()


def cost(schema: Any, vocabulary: list[bytes]) -> float:
    """The processor's seconds for a grammar, the least of three."""
    seconds = []
    for _ in range(3):
        before = time.process_time()
        compiled(schema, vocabulary)
        seconds.append(time.process_time() - before)
    return min(seconds)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(SCHEMAS)
def test_every_accepted_schema_has_a_grammar_that_follows_it(schema: dict[str, Any]):
    try:
        checked_schema(schema, "schema")
    except BadRequest:
        return
    grammar = compiled(schema, BYTES)
    for value in VALUES:
        if allows(grammar, json.dumps(value, separators=(",", ":"))):
            assert Draft202012Validator(schema).is_valid(value), (value, schema)


def test_the_costliest_accepted_schema_costs_no_more_than_150_short_names():
    vocabulary = BYTES + ["".join(letters).encode() for letters in product("aet", repeat=7)]
    text, each = {"type": "string"}, MAX_OPEN_BYTES // MAX_OPEN_NAMES
    named = {"type": "object", "properties": {"e" * 10: text}, "additionalProperties": text}
    opened = [{**named, "properties": {"e" * (each - i % 2) + "a" * (i % 2): text}} for i in range(MAX_OPEN_NAMES)]
    closed = {"type": "object", "properties": {"e" * 200 + f"{i}": text for i in range(MAX_PROPERTIES - len(opened))}}
    formats = [{"type": "string", "format": COSTLY_FORMATS[i % 3]} for i in range(MAX_COSTLY)]
    bounds = [{"type": "number", "minimum": 0.123456 + i} for i in range(MAX_RULES - len(formats))]
    worst = {"type": "array", "prefixItems": [*opened, closed, *formats, *bounds]}
    checked_schema(worst, "schema")
    assert cost(worst, vocabulary) < 150 * cost(named, vocabulary)
