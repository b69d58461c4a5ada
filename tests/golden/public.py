"""Settings, metrics, the command line and the HTTP API."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from prometheus_client import REGISTRY, CollectorRegistry

from app import cli, settings, telemetry, web
from workers import cli as workers_cli
from workers.process import telemetry as worker_telemetry

ROOT = Path(__file__).parents[2]
_VARIABLES = (
    *("TINSMITH_REDIS_URL", "TINSMITH_BROKER_URL", "TINSMITH_S3_ACCESS_KEY", "TINSMITH_S3_SECRET_KEY"),
    "TINSMITH_URL_SECRET",
    "TINSMITH_CAPTURE_SECRET",
    "TINSMITH_API_KEY",
    "TINSMITH_OPERATOR_KEY",
)


def goldens() -> dict[str, Any]:
    return {
        "settings": dict(_settings()),
        "setting values": dict(_flat("", _example().model_dump(mode="json"))),
        "environment": _environment(),
        "metrics": {**_metrics(telemetry.REGISTRY, "api"), **_metrics(REGISTRY, "worker")},
        "command line": {
            **_commands(cli.main),
            **_commands(workers_cli.run_trainer),
            **_commands(workers_cli.run_sampler),
        },
        "openapi": dict(_operations(web.openapi())),
    }


def _example() -> settings.Settings:
    """A configuration with one of every section."""
    base = {"name": "base", "path": "/models/base", "full": {}, "full_sampler": {}}
    return settings.parse({"base_models": [base]}, "an example")


def _settings() -> Iterator[tuple[str, Any]]:
    """Each key of the configuration file, its allowed values, and its default."""
    schema = settings.Settings.model_json_schema()
    yield from _keys("", schema, schema["$defs"])


def _keys(prefix: str, section: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, found in section["properties"].items():
        nested = _nested(found, known)
        if nested is not None:
            yield from _keys(f"{prefix}{name}.", nested, known)
        else:
            yield prefix + name, {key: value for key, value in found.items() if key not in ("title", "description")}
    yield f"{prefix}<required>", section.get("required", [])
    yield f"{prefix}<others>", section.get("additionalProperties")


def _nested(found: Any, known: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section that a key holds, or a list of it, or none if the key is left out."""
    if isinstance(found, Mapping) and "$ref" in found:
        return dict(known[found["$ref"].rpartition("/")[2]])
    parts = [found.get("items"), *found.get("anyOf", ())] if isinstance(found, Mapping) else []
    return next((nested for part in parts if (nested := _nested(part, known)) is not None), None)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else name, part)
    elif isinstance(value, list) and value:
        for index, part in enumerate(value):
            yield from _flat(f"{prefix}[{index}]", part)
    else:
        yield prefix, value


def _environment() -> dict[str, Any]:
    """Settings of each environment variable, and their values."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tinsmith.toml"
        path.write_text("")
        plain = dict(_flat("", settings.load(path, {}).model_dump(mode="json")))
        found: dict[str, Any] = {}
        for variable in _VARIABLES:
            value = "tml-value-of-a-key" if variable.endswith("_KEY") and "S3" not in variable else "redis://value/3"
            changed = dict(_flat("", settings.load(path, {variable: value}).model_dump(mode="json")))
            found[variable] = {key: value for key, value in changed.items() if plain.get(key) != value}
        assert settings.from_environment({"TINSMITH_SETTINGS": str(path)}) == settings.load(path, {})
    texts = (path.read_text() for folder in ("app", "workers") for path in (ROOT / folder).rglob("*.py"))
    named = {name for text in texts for name in re.findall(r"\bTINSMITH_[A-Z0-9_]+", text)}
    return {**found, **dict.fromkeys(sorted(named - found.keys()), "is read")}


def _metrics(registry: CollectorRegistry, where: str) -> dict[str, Any]:
    assert worker_telemetry.OPS is not None, "the workers' metrics are registered when they are imported"
    found = {}
    collectors = list(registry._collector_to_names)
    described = [metric for each in collectors if not hasattr(each, "_name") for metric in _described(each)]
    for metric in [*collectors, *described]:
        name = getattr(metric, "_name", getattr(metric, "name", ""))
        if name.startswith("tinsmith_"):
            labels = list(getattr(metric, "_labelnames", ()))
            bounds = getattr(metric, "_kwargs", {}).get("buckets")
            found[f"{where}: {name}"] = {
                "type": getattr(metric, "_type", getattr(metric, "type", "")),
                "labels": labels,
                "buckets": None if bounds is None else list(bounds),
            }
    return found


def _described(collector: Any) -> list[Any]:
    """The metrics of a collector that is no metric itself."""
    return list(collector.describe()) if hasattr(collector, "describe") else []


class _Caught(BaseException):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def _commands(main: Callable[[], object]) -> dict[str, Any]:
    """Each command of a program and each of its options, by the program's own parser."""

    def catch(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _Caught(parser)

    try:
        with patch.object(argparse.ArgumentParser, "parse_known_args", catch):
            main()
    except _Caught as caught:
        return dict(_parts(caught.parser))
    raise AssertionError("a program parses its arguments first")


def _parts(parser: argparse.ArgumentParser) -> Iterator[tuple[str, Any]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for nested in action.choices.values():
                yield from _parts(nested)
        else:
            name = "/".join(action.option_strings) or action.dest
            default = None if action.default is argparse.SUPPRESS else action.default
            yield (
                f"{parser.prog} {name}",
                {
                    "default": str(default) if isinstance(default, Path) else default,
                    "required": action.required,
                    "values": None if action.choices is None else list(action.choices),
                    "takes": action.nargs,
                    "repeats": isinstance(action, argparse._AppendAction),
                },
            )


def _operations(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Digests of the parts of the OpenAPI document, so that a change shows its place. Words for readers may change:
    descriptions, examples and groups. Tests of app/api say which routes need a key."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method} {path}", _digest(_without_words(_without(operation, "tags", "security")))
    for kind, components in document.get("components", {}).items():
        for name, component in components.items():
            yield f"{kind} {name}", _digest(_without_words(component))
    for name in sorted(document.keys() - {"paths", "components", "tags", "security"}):
        yield name, _digest(_without_words(document[name]))


def _without(part: Any, *keys: str) -> Any:
    return {key: value for key, value in part.items() if key not in keys} if isinstance(part, dict) else part


def _without_words(part: Any) -> Any:
    """A part without its descriptions and examples. A field of a body may have the name of one: it is no text."""
    if isinstance(part, list):
        return [_without_words(each) for each in part]
    if not isinstance(part, dict):
        return part
    return {
        key: _without_words(value)
        for key, value in part.items()
        if key != "example" and not (key in ("summary", "description") and isinstance(value, str))
    }


def _digest(part: Any) -> str:
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()
