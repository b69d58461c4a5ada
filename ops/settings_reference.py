"""Writes docs/settings.md from the settings' own descriptions: `make docs`. A test compares the page with the code."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from app.settings import Settings

PATH = Path(__file__).parents[1] / "docs" / "settings.md"
_HEAD = """# Settings

One TOML file has the settings: `tinsmith up --config tinsmith.toml`. An unknown key is an error, and `tinsmith doctor`
checks a file. Secrets may come from the environment instead: `TINSMITH_REDIS_URL`, `TINSMITH_BROKER_URL`,
`TINSMITH_S3_ACCESS_KEY`, `TINSMITH_S3_SECRET_KEY`, `TINSMITH_URL_SECRET`, `TINSMITH_CAPTURE_SECRET`,
`TINSMITH_API_KEY`, and `TINSMITH_OPERATOR_KEY` for the key of an operator. A variable overrides the file, unless it
is empty; the two keys are added to those in the file. An option of `tinsmith up` overrides both. The SDK accepts only
keys that begin with `tml-` and have at least 8 more characters.

```toml
data_dir = "/srv/tinsmith"

[api]
host = "0.0.0.0"
public_url = "https://tinsmith.example.org"

[store]                                # default: a folder under data_dir
url = "https://s3.example.org/tinsmith"  # keys: TINSMITH_S3_ACCESS_KEY, TINSMITH_S3_SECRET_KEY

[[base_models]]
name = "Qwen/Qwen3-8B"
path = "/models/qwen3-8b"
max_context = 16384
max_rank = 64

[base_models.trainer]
devices = [0, 1]
ranks = 2
zero_stage = 3

[base_models.full]                     # leave it out for LoRA alone
devices = [3, 4]
ranks = 2
zero_stage = 3

[base_models.sampler]
backend = "vllm"
devices = [2]                          # by nvidia-smi's numbers; leave all `devices` out for free ones
memory_share = 0.9
engine_args = { enable_prefix_caching = true }

[base_models.full_sampler]             # samples what [base_models.full] trains
backend = "vllm"
devices = [5]
```

`make docs` writes this page from `app/settings/`.
"""
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}


def text() -> str:
    """The page as the file holds it."""
    schema = Settings.model_json_schema()
    return _HEAD + "".join(_section("", "", schema, schema["$defs"], {}))


def _section(
    title: str, description: str, schema: Mapping[str, Any], known: Mapping[str, Any], shown: dict[str, str]
) -> Iterator[str]:
    """The table of a section's own keys, and then its sections.

    `known` are the schemas by name. `shown` is the title under which each was shown, and is added to.
    """
    yield f"\n## {f'`{title}`' if title else 'At the top of the file'}\n"
    if description:
        yield f"\n{description[0].upper()}{description[1:]}.\n"
    if schema["title"] in shown:
        yield f"\nThe settings are those of `{shown[schema['title']]}`.\n"
        return
    shown[schema["title"]] = title
    yield "\n| Setting | Values | Default | |\n|---|---|---|---|\n"
    parts = {name: _nested(found, known) for name, found in schema["properties"].items()}
    for name, found in schema["properties"].items():
        if parts[name] is None:
            default = "required" if name in schema.get("required", ()) else _default(found)
            yield f"| `{name}` | {_values(found)} | {default} | {_described(found)} |\n"
    outer = title.strip("[]")
    for name, part in parts.items():
        if part is not None:
            found, path = schema["properties"][name], f"{outer}.{name}" if outer else name
            inner = f"[[{path}]]" if "items" in found else f"[{path}]"
            yield from _section(inner, found.get("description", ""), part, known, shown)


def _nested(found: Any, known: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section that a key holds, or a list of it, or none."""
    if not isinstance(found, Mapping):
        return None
    if "$ref" in found:
        return dict(known[found["$ref"].rpartition("/")[2]])
    parts = (_nested(part, known) for part in (found.get("items"), *found.get("anyOf", ())))
    return next((part for part in parts if part is not None), None)


def _described(found: Mapping[str, Any]) -> str:
    return str(found.get("description", "")).replace("|", "\\|")


def _default(found: Mapping[str, Any]) -> str:
    return "none" if found["default"] is None else f"`{_toml(found['default'])}`"


def _values(found: Mapping[str, Any]) -> str:
    if "anyOf" in found:
        return " or ".join(dict.fromkeys(_values(part) for part in found["anyOf"] if part.get("type") != "null"))
    if "enum" in found or "const" in found:
        return ", ".join(f"`{_toml(value)}`" for value in found.get("enum", [found.get("const")]))
    if found["type"] == "array":
        return f"list of {_values(found['items'])}"
    named = {"string": "text", "integer": "whole number", "boolean": "`true`, `false`", "object": "table"}
    bounds = [f"{sign} {found[name]:,}" for name, sign in _BOUNDS.items() if name in found]
    return " ".join([named.get(found["type"], found["type"]), ", ".join(bounds)]).strip()


def _toml(value: Any) -> str:
    """A value as TOML writes it."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:_}" if whole else json.dumps(value)


if __name__ == "__main__":
    PATH.write_text(text())
