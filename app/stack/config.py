"""Builds one Settings from the config file, the environment and the command line; the later source wins.

`--redis` also empties the broker's URL of the earlier sources, so that the broker is on the given server too. Only a
URL of sentinels keeps it: no sentinels watch the broker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app import settings as settings_module
from app.settings import SENTINEL_SCHEMES, Settings, checked_key, hash_key


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line. None (or empty) keeps the config file's value.

    base_models: (name, path or hub id). trainer, sampler, trainers, samplers, ranks and zero_stage apply to every
    base model. quiet: `tinsmith up` prints only warnings and `ready URL`.
    """

    config: Path | None = None
    host: str | None = None
    port: int | None = None
    data_dir: Path | None = None
    base_models: tuple[tuple[str, str], ...] = ()
    api_key: str | None = None
    trainer: str | None = None
    sampler: str | None = None
    trainers: int | None = None
    samplers: int | None = None
    ranks: int | None = None
    zero_stage: int | None = None
    redis: str | None = None
    s3: str | None = None
    quiet: bool = False


def resolve(options: Options, environ: Mapping[str, str]) -> Settings:
    """Builds the settings. Raises SetupError naming a value that cannot be used."""
    given = settings_module.load(options.config, environ) if options.config else settings_module.defaults(environ)
    raw = given.model_dump(mode="json")
    _override(raw, data_dir=str(options.data_dir) if options.data_dir else None)
    _override(raw["api"], host=options.host, port=options.port)
    _override(raw["redis"], url=options.redis)
    _override(raw["store"], url=options.s3)
    if options.redis and not options.redis.startswith(SENTINEL_SCHEMES):
        raw["redis"]["broker_url"] = ""
    if options.api_key is not None:
        digest = hash_key(checked_key(options.api_key, "--api-key"))
        raw["api_keys"] = list(dict.fromkeys([digest, *raw["operator_keys"]]))
    for name, path in options.base_models:
        _set_base_model(raw["base_models"], name, path)
    return settings_module.parse(raw, "command line")


def for_every_base_model(settings: Settings, options: Options) -> Settings:
    """Applies the options that hold for every base model. It is a separate step, because the bundled base model may be
    added first."""
    raw = settings.model_dump(mode="json")
    for base in raw["base_models"]:
        _override(
            base["trainer"],
            backend=options.trainer,
            count=options.trainers,
            ranks=options.ranks,
            zero_stage=options.zero_stage,
        )
        _override(base["sampler"], backend=options.sampler, count=options.samplers)
    return settings_module.parse(raw, "command line")


def _override(section: dict[str, Any], **values: Any) -> None:
    section.update({key: value for key, value in values.items() if value is not None})


def _set_base_model(bases: list[dict[str, Any]], name: str, path: str) -> None:
    known = next((base for base in bases if base["name"] == name), None)
    if known is None:
        bases.append({"name": name, "path": path, "trainer": {}, "sampler": {}})
    else:
        known["path"] = path
