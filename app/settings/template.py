"""A config file with every setting: values that are given, and all others as comments with their defaults.

Its text is made from the descriptions of the settings. A line of text begins with "# ", a default with "#".
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tomli_w

from app.settings.root import Settings

_COLUMNS = 79
_REFERENCE = "#/$defs/"
# Shown for settings without a default.
_EXAMPLES = {"name": "Qwen/Qwen3-0.6B", "path": "/models/Qwen3-0.6B"}
_BASE_MODELS = "base_models"

Values = Mapping[str, Any]


def template(base_model: Values, about: Iterable[str]) -> str:
    """The text of a config file with one base model (empty: the bundled one) below the lines `about`."""
    schema = Settings.model_json_schema()
    fields = _Fields(schema["$defs"])
    lines = [*_prose(*about), *fields.plain(schema, {})]
    lines += fields.base_model(schema["properties"][_BASE_MODELS], base_model)
    return "\n".join([*lines, *fields.tables("", schema, {}, "")]) + "\n"


class _Fields:
    """Writes the fields of sections, by their JSON schemas. `mark` is "#" for a section that is a comment."""

    def __init__(self, sections: Values) -> None:
        self._sections = sections

    def base_model(self, field: Values, values: Values) -> Iterator[str]:
        section = self._sections[field["items"]["$ref"].removeprefix(_REFERENCE)]
        mark = "" if values else "#"
        yield from ("", *_prose(field["description"]), f"{mark}[[{_BASE_MODELS}]]", *self.plain(section, values))
        yield from self.tables(f"{_BASE_MODELS}.", section, values, mark)

    def tables(self, path: str, section: Values, values: Values, mark: str) -> Iterator[str]:
        """The sections inside a section. One that may be missing has the fields of another one, and is only named."""
        for name, field in section["properties"].items():
            inner = self._section(field)
            if inner is None:
                continue
            yield from ("", *_prose(field["description"]))
            if "anyOf" in field:
                yield f"#[{path}{name}]"
            else:
                own = values.get(name, {})
                yield from (f"{mark}[{path}{name}]", *self.plain(inner, own))
                yield from self.tables(f"{path}{name}.", inner, own, mark)

    def plain(self, section: Values, values: Values) -> Iterator[str]:
        """The fields of a section that are no sections."""
        for name, field in section["properties"].items():
            if self._section(field) is None and name != _BASE_MODELS:
                yield from ("", *_prose(field["description"]))
                yield _assignment(name, values[name]) if name in values else f"#{_default(name, field)}"

    def _section(self, field: Values) -> Any:
        """The schema of a field that is a section of settings, else None."""
        optional: Values = next(iter(field.get("anyOf", ())), {})
        reference = field.get("$ref") or optional.get("$ref", "")
        return self._sections[reference.removeprefix(_REFERENCE)] if reference else None


def _default(name: str, field: Values) -> str:
    default = field.get("default", _EXAMPLES.get(name))
    return f"{name} = NUMBER" if default is None else _assignment(name, default)


def _assignment(name: str, value: Any) -> str:
    return tomli_w.dumps({name: value}).strip() if value != {} else f"{name} = {{}}"


def _prose(*texts: str) -> Iterator[str]:
    for text in texts:
        yield from textwrap.wrap(text, _COLUMNS, initial_indent="# ", subsequent_indent="# ", break_long_words=False)
