"""Describes every mistake of a config file in one sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_NOT_A_SECTION = ("model_type", "dataclass_type")


class _Location(NamedTuple):
    """The place of a mistake: `path` is the whole key as in the file; `section` is the settings class that has, or
    lacks, the field `key`."""

    path: str
    section: Any
    key: str


def describe(error: ValidationError, settings: type[BaseModel]) -> list[str]:
    """One sentence for each wrong key of `settings`: its path, the mistake, and its value unless it may be secret."""
    found: dict[_Location, list[Any]] = {}
    for each in error.errors():
        # A value that fits no member of a union is one mistake; pydantic reports it once for each member.
        found.setdefault(_locate(each["loc"], settings), []).append(each)
    return [f"{location.path}: {_sentence(location, errors)}" for location, errors in found.items()]


def _locate(parts: tuple[int | str, ...], settings: type[BaseModel]) -> _Location:
    path: list[str] = []
    section, key = settings, ""
    inner: Any = settings
    for part in parts:
        if isinstance(part, int):
            path.append(str(part))
        elif inner is not None:  # after a plain value pydantic adds names of union members
            path.append(part)
            section, key = inner, part
            inner = next(_sections(_annotations(section).get(key)), None)
    return _Location(".".join(path), section, key)


def _sentence(location: _Location, errors: list[Any]) -> str:
    kind, value = errors[0]["type"], errors[0]["input"]
    if kind in _UNKNOWN:  # the value is not shown: the key may be the misspelt name of a secret
        near = get_close_matches(location.key, _annotations(location.section), n=1)
        return "there is no such setting" + "".join(f"; did you mean {name!r}?" for name in near)
    if kind in _NOT_A_SECTION:
        return "this is a section of settings, not one value"
    if kind == "tuple_type" and isinstance(value, Mapping):
        return f"this is a list of sections; write [[{location.path}]]"
    shown = "" if _is_secret(location) or _has_sections(value) else f" (got {value!r})"
    return " or ".join(dict.fromkeys(map(_message, errors))) + shown


def _message(error: Any) -> str:
    if error["type"] == "tuple_type":  # TOML has only lists, no tuples
        return "Input should be a list"
    return str(error["ctx"]["error"] if error["type"] == "value_error" else error["msg"]).replace("Tuple", "List")


def _has_sections(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(each, Mapping) for each in value))


def _is_secret(location: _Location) -> bool:
    return issubclass(location.section, BaseModel) and not location.section.model_fields[location.key].repr


def _annotations(section: Any) -> dict[str, Any]:
    if is_dataclass(section):
        return {field.name: field.type for field in fields(section)}
    return {name: field.annotation for name, field in section.model_fields.items()}


def _sections(annotation: Any) -> Iterator[Any]:
    """The settings classes in a field's type, such as `Section | None` or `tuple[Section, ...]`."""
    if isinstance(annotation, type) and (is_dataclass(annotation) or issubclass(annotation, BaseModel)):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections(argument)
