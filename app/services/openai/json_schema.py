"""Checks of the JSON schema that an answer must follow, before it is journaled.

The sampler compiles a schema into a grammar. Only keywords that xgrammar 0.2.8 follows are accepted, and only together
with those beside which it follows them. All costs are bounded. `minLength` and `maxLength` are not accepted: their
strings may hold raw control characters, which is no JSON, and 10,000 characters of them took two cores between 10 and
35 s.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from app.errors import BadRequest

ANY_OBJECT = '{"type":"object"}'
"""The schema of any JSON object."""
MAX_BYTES = 32 * 1024
MAX_DEPTH = 10
MAX_PARTS = 500
MAX_PROPERTIES = 100
MAX_VALUES = 500
MAX_ITEMS = 1000
"""The sum of all minItems and maxItems of a schema."""
MAX_RULES = 50
"""The number of formats and bounds of a schema. With 49,000 tokens each costs up to 10 ms, except `COSTLY_FORMATS`."""
MAX_COSTLY = 10
"""The number of `COSTLY_FORMATS` of a schema. With 49,000 tokens each costs up to 45 ms."""
MAX_OPEN_NAMES = 20
MAX_OPEN_BYTES = 200
"""The bytes of all property names of objects that allow other names too. The grammar tells their names from any other
name, which costs 10 ms a byte with 49,000 tokens and 30 ms with 150,000."""
_MAX_NUMBER = 2**53
_DECIMALS = 6
"""xgrammar rounds the bounds of a number to these decimals."""

_PYTHON_TYPES: Mapping[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": int | float,
    "boolean": bool,
    "null": type(None),
}
_TYPES = tuple(_PYTHON_TYPES)
COSTLY_FORMATS = ("email", "hostname", "uri")
_FORMATS = (*COSTLY_FORMATS, "date", "time", "date-time", "duration", "ipv4", "ipv6", "uuid")
_REF = "#/$defs/"
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_TYPES_OF: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("properties", "required", "additionalProperties"), ("object",)),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems"), ("array",)),
    **dict.fromkeys(_BOUNDS, ("integer", "number")),
    "format": ("string",),
}
_ALONE: Mapping[str, set[str]] = {"$ref": set(), "anyOf": set(), "enum": {"type"}, "const": {"type"}}
"""The keywords that the grammar follows alone, and those that may be beside them."""
_REMARKS = ("$defs", "$schema", "title", "description", "default", "examples")


def checked_schema(schema: Any, name: str) -> str:
    """The schema as JSON text. `name`: its name in the request. Raises BadRequest for a schema that no grammar follows
    exactly, or that costs too much."""
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        raise BadRequest(f"{name} holds NaN or a number beyond a double's range, which is no JSON") from None
    if len(text.encode()) > MAX_BYTES:
        raise BadRequest(f"{name} has {len(text.encode())} bytes; at most {MAX_BYTES} are allowed")
    _Check(schema, name).run()
    return text


class _Check:
    """One check of one schema. Its counts are those of the whole schema."""

    def __init__(self, schema: Any, name: str) -> None:
        self._schema, self._name = schema, name
        self._definitions: Mapping[str, Any] = {}
        self._counts: Counter[str] = Counter()

    def run(self) -> None:
        if not isinstance(self._schema, dict):
            raise BadRequest(f"{self._name} must be an object")
        definitions = self._schema.get("$defs", {})
        if not isinstance(definitions, dict):
            raise BadRequest(f"{self._name}.$defs must be an object")
        if any("/" in name for name in definitions):
            raise BadRequest(f"{self._name}.$defs has a name with '/', which is not supported here")
        self._definitions = definitions
        self._part(self._schema, self._name, 0)
        self._refuse_recursion()

    def _part(self, part: Any, where: str, depth: int) -> None:
        if not isinstance(part, dict):
            raise BadRequest(f"{where} must be an object")
        if depth > MAX_DEPTH:
            raise BadRequest(f"{where} is nested more than {MAX_DEPTH} levels deep")
        self._count("parts", 1, MAX_PARTS)
        for keyword, value in part.items():
            accepts = _KEYWORDS.get(keyword)
            if accepts is None or (keyword == "$defs" and depth):
                raise BadRequest(
                    f"{where}: the keyword {keyword[:40]!r} is not supported here; the keywords are "
                    f"{', '.join(_KEYWORDS)} ($defs at the top alone)"
                )
            if not accepts(value):
                raise BadRequest(f"{where}.{keyword} has a value that is not supported: {json.dumps(value)[:80]}")
        self._check_together(part, where)
        self._check_values(part, where)
        for place, inner in _inner(part):
            self._part(inner, f"{where}.{place}", depth + 1)

    def _check_together(self, part: Mapping[str, Any], where: str) -> None:
        """Requires keywords that the grammar follows together. It ignores some of others without a word."""
        rules = [keyword for keyword in part if keyword not in _REMARKS]
        alone = next((keyword for keyword in _ALONE if keyword in part), None)
        if alone and set(rules) - _ALONE[alone] - {alone}:
            beside = " and ".join(("remarks", *_ALONE[alone]))
            raise BadRequest(f"{where} has {', '.join(rules)}: beside {alone} only {beside} are supported here")
        types = _types(part)
        for keyword in rules:
            kinds = _TYPES_OF.get(keyword)
            if kinds and not set(kinds) & set(types):
                raise BadRequest(f"{where}.{keyword} needs the type {' or '.join(kinds)}")
        for value in (*part.get("enum", ()), *([part["const"]] if "const" in part else ())):
            if types and not any(_has_type(value, kind) for kind in types):
                raise BadRequest(f"{where} has the value {json.dumps(value)[:40]}, which is not of its type")

    def _check_values(self, part: Mapping[str, Any], where: str) -> None:
        self._count("properties", len(part.get("properties", ())), MAX_PROPERTIES)
        self._count("enum values", len(part.get("enum", ())), MAX_VALUES)
        self._count("items", part.get("minItems", 0) + part.get("maxItems", 0), MAX_ITEMS)
        self._count("formats and bounds", len(part.keys() & (_BOUNDS | {"format"})), MAX_RULES)
        self._count(f"formats {', '.join(COSTLY_FORMATS)}", part.get("format") in COSTLY_FORMATS, MAX_COSTLY)
        if part.get("additionalProperties", False) is not False:
            names = part.get("properties", {})
            self._count("property names beside additionalProperties", len(names), MAX_OPEN_NAMES)
            size = sum(len(json.dumps(name, ensure_ascii=False).encode()) - 2 for name in names)
            self._count("bytes of property names beside additionalProperties", size, MAX_OPEN_BYTES)
        _check_range(part, where)
        _check_length(part, where)
        missing = set(part.get("required", ())) - set(part.get("properties", ()))
        if missing:
            raise BadRequest(f"{where}.required names {min(missing)[:40]!r}, which is not among its properties")
        target = part.get("$ref", _REF).removeprefix(_REF)
        if target and target not in self._definitions:
            raise BadRequest(f"{where}.$ref names {target[:40]!r}, which is not among $defs")

    def _count(self, what: str, more: int, most: int) -> None:
        self._counts[what] += more
        if self._counts[what] > most:
            raise BadRequest(f"{self._name} has more than {most} {what}; send a smaller schema")

    def _refuse_recursion(self) -> None:
        """Requires that no definition leads back to itself: its answer might never end."""
        leads = {name: set(_references(part)) for name, part in self._definitions.items()}
        while leaves := [name for name, to in leads.items() if not to & leads.keys()]:
            for name in leaves:
                del leads[name]
        if leads:
            raise BadRequest(f"{self._name}.$defs.{min(leads)[:40]} leads back to itself, which is not supported here")


def _check_range(part: Mapping[str, Any], where: str) -> None:
    """Requires bounds that the grammar can hold, with at least one number between them."""
    decimals = 0 if "integer" in _types(part) else _DECIMALS
    given = {bound: part[bound] for bound in sorted(_BOUNDS & part.keys())}
    for bound, value in given.items():
        if round(value, decimals) != value:
            most = "a whole number" if decimals == 0 else f"a number of at most {decimals} decimals"
            raise BadRequest(f"{where}.{bound} must be {most}")
    steps = {bound: round(Fraction(value) * 10**decimals) for bound, value in given.items()}
    low = max(steps.get("minimum", -math.inf), steps.get("exclusiveMinimum", -math.inf) + 1)
    high = min(steps.get("maximum", math.inf), steps.get("exclusiveMaximum", math.inf) - 1)
    if low > high:
        raise BadRequest(f"{where}: no number lies within {', '.join(f'{bound} {given[bound]}' for bound in given)}")


def _check_length(part: Mapping[str, Any], where: str) -> None:
    """Requires an array's length that its items can have. The grammar allows only the items that a schema describes."""
    least, most, first = part.get("minItems", 0), part.get("maxItems", math.inf), len(part.get("prefixItems", ()))
    if least > most:
        raise BadRequest(f"{where}: minItems {least} is above maxItems {most}")
    if first > most:
        raise BadRequest(f"{where}: maxItems {most} is below the number of its prefixItems, {first}")
    if "items" not in part and (least > first or (most < math.inf and not first)):
        raise BadRequest(f"{where}: minItems and maxItems beyond its prefixItems need items")


def _types(part: Mapping[str, Any]) -> Sequence[str]:
    types = part.get("type", ())
    return (types,) if isinstance(types, str) else types


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _PYTHON_TYPES[kind])


def _inner(part: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(place, schema) of the schemas directly inside a schema."""
    for keyword in ("properties", "$defs"):
        for name, inner in part.get(keyword, {}).items():
            yield f"{keyword}.{name[:40]}", inner
    for keyword in ("anyOf", "prefixItems"):
        for place, inner in enumerate(part.get(keyword, ())):
            yield f"{keyword}.{place}", inner
    for keyword in ("items", "additionalProperties"):
        if not isinstance(part.get(keyword, False), bool):
            yield keyword, part[keyword]


def _references(part: Mapping[str, Any]) -> Iterator[str]:
    if "$ref" in part:
        yield part["$ref"].removeprefix(_REF)
    for _, inner in _inner(part):
        yield from _references(inner)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_anything(_: Any) -> bool:
    return True


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_NUMBER


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is_type(value: Any) -> bool:
    return value in _TYPES if isinstance(value, str) else _is_list(value) and all(entry in _TYPES for entry in value)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _is_schema_or_no(value: Any) -> bool:
    return isinstance(value, dict | bool)


_KEYWORDS: Mapping[str, Callable[[Any], bool]] = {
    "type": _is_type,
    "properties": _is_object,
    "required": _is_names,
    "additionalProperties": _is_schema_or_no,
    "items": _is_object,
    "prefixItems": _is_list,
    "minItems": _is_count,
    "maxItems": _is_count,
    "enum": _is_list,
    "const": _is_anything,
    "format": lambda value: value in _FORMATS,
    "minimum": _is_number,
    "maximum": _is_number,
    "exclusiveMinimum": _is_number,
    "exclusiveMaximum": _is_number,
    "anyOf": _is_list,
    "$ref": lambda value: isinstance(value, str) and value.startswith(_REF) and value != _REF,
    "$defs": _is_object,
    "$schema": _is_text,
    "title": _is_text,
    "description": _is_text,
    "default": _is_anything,
    "examples": _is_anything,
}
