"""Reads a Compose file as Docker does: variables first, then the specification."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from compose_spec import PyCompose

ROOT = Path(__file__).parents[3]
COMPOSE = ROOT / "docker-compose.yml"
GPU_OVERRIDE = ROOT / "ops" / "compose.gpu.yml"
SECOND_TRAINER = ROOT / "ops" / "compose.second-trainer.yml"
SECRETS = {
    "REDIS_PASSWORD": "hush1",
    "MINIO_ROOT_USER": "minio-user",
    "MINIO_ROOT_PASSWORD": "hush2",
    "URL_SECRET": "hush3-hush3-hush3-hush3-hush3-hush3",
    "TINSMITH_API_KEY": "tml-hush-hush3",
    "FLOWER_BASIC_AUTH": "me:hush4",
}
VALUES = {**SECRETS, "TINSMITH_MODEL_DIR": "/srv/model"}

_VARIABLE = re.compile(r"\$\{(\w+)(:[?-])?([^}]*)\}")


def interpolate(text: str, values: Mapping[str, str]) -> str:
    """Raises KeyError with the message for a required variable without a value."""

    def value(match: re.Match[str]) -> str:
        name, operator, rest = match.groups()
        if values.get(name):
            return values[name]
        if operator == ":-":
            return rest
        raise KeyError(f"{name}: {rest}")

    return _VARIABLE.sub(value, text)


def validate(text: str) -> None:
    """Raises ValueError when `text`, its variables replaced, is no valid Compose file."""
    # PyYAML resolves the anchors and merge keys, which the checker does at the top level only.
    PyCompose.from_yaml(yaml.safe_dump(yaml.safe_load(text))).validate()


def load(path: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load(interpolate(path.read_text(), VALUES))
    return parsed
