"""Loads the settings from a TOML file; secrets from the environment override it."""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from app.domain.accounts import KEY_PREFIX
from app.errors import SetupError
from app.settings.mistakes import describe
from app.settings.root import Settings

SETTINGS_VARIABLE = "TINSMITH_SETTINGS"
METRICS_PORT_VARIABLE = "TINSMITH_METRICS_PORT"
"""The port that `tinsmith up` gives to a worker's metrics; 0: any free one."""

_IN_SECTIONS = {
    "TINSMITH_REDIS_URL": ("redis", "url"),
    "TINSMITH_BROKER_URL": ("redis", "broker_url"),
    "TINSMITH_S3_ACCESS_KEY": ("store", "access_key"),
    "TINSMITH_S3_SECRET_KEY": ("store", "secret_key"),
}
_AT_THE_TOP = {"TINSMITH_URL_SECRET": "url_secret", "TINSMITH_CAPTURE_SECRET": "capture_secret"}
_KEYS = {"TINSMITH_API_KEY": ("api_keys",), "TINSMITH_OPERATOR_KEY": ("api_keys", "operator_keys")}

SECRET_VARIABLES = (*_IN_SECTIONS, *_AT_THE_TOP, *_KEYS)
"""The variables that override a config file."""


def hash_key(secret: str) -> str:
    """The sha256 digest of a key, or of the secret part of one. These have 256 random bits, so a plain sha256 is enough
    at rest."""
    return hashlib.sha256(secret.encode()).hexdigest()


def checked_key(key: str, source: str) -> str:
    """The key itself. Raises SetupError naming its source, an option or a variable, if the SDK accepts no such key."""
    if not key.startswith(KEY_PREFIX) or len(key) < len(KEY_PREFIX) + 8:
        raise SetupError(
            f"{source} must start with {KEY_PREFIX!r} and have at least 8 characters after it: the tinker SDK accepts "
            "no other keys"
        )
    return key


def load(path: Path, environ: Mapping[str, str] = os.environ) -> Settings:
    """Loads settings from a TOML file; secrets from the environment override it. Raises SetupError naming the
    mistake."""
    try:
        raw = tomllib.loads(path.read_text())
    except OSError as error:
        raise SetupError(f"cannot read the config file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SetupError(f"the config file {path} is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise SetupError(f"{path} is not valid TOML: {error}") from None
    return parse(_with_secrets(raw, environ), str(path))


def defaults(environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings of an empty file, with the secrets from the environment."""
    return parse(_with_secrets({}, environ), "the environment")


def parse(raw: Mapping[str, Any], source: str) -> Settings:
    """Builds settings from plain values. Raises SetupError naming every bad key: one in a single line, several on a
    line each below the first."""
    try:
        return Settings.model_validate(raw)
    except ValidationError as error:
        mistakes = describe(error, Settings)
    if len(mistakes) == 1:
        raise SetupError(f"{source}: {mistakes[0]}")
    raise SetupError("\n  ".join([f"{source} has {len(mistakes)} mistakes:", *mistakes]))


def from_environment(environ: Mapping[str, str] = os.environ) -> Settings:
    """Loads the settings that every started process reads, from the file that TINSMITH_SETTINGS names."""
    path = environ.get(SETTINGS_VARIABLE)
    if not path:
        raise SetupError(f"set {SETTINGS_VARIABLE} to the path of a config file (see docs/servers.md)")
    return load(Path(path), environ)


def without_secret_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that takes its settings from its config file alone."""
    return {name: value for name, value in environ.items() if name not in SECRET_VARIABLES}


def _with_secrets(raw: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    # Containers pass on an unset variable as an empty one, so an empty one counts as unset.
    for variable, (section, key) in _IN_SECTIONS.items():
        values = raw.setdefault(section, {}) if environ.get(variable) else None
        if isinstance(values, dict):  # a value that is not a section is refused later
            values[key] = environ[variable]
    for variable, key in _AT_THE_TOP.items():
        if secret := environ.get(variable):
            raw[key] = secret
    for variable, names in _KEYS.items():
        if not environ.get(variable):
            continue
        digest = hash_key(checked_key(environ[variable], variable))
        for name in names:
            keys = raw.get(name, [])
            if isinstance(keys, list) and digest not in keys:  # another value is refused later
                raw[name] = [*keys, digest]
    return raw
