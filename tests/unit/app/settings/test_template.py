"""The config file that `tinsmith init` writes has every setting, and is read by the server's own loader."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from app import settings
from app.domain.prices import Prices
from app.settings import Settings
from app.settings.template import template

BASE = {"name": 'org/"odd" ü', "path": "/models/a b", "trainer": {"ranks": 2}, "sampler": {"memory_share": 0.45}}


def loaded(text: str, tmp_path: Path) -> Settings:
    (tmp_path / "t.toml").write_text(text)
    return settings.load(tmp_path / "t.toml", {})


def fields() -> Iterator[tuple[str, Any]]:
    schema = Settings.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        yield from section["properties"].items()


def test_every_setting_is_described():
    assert [name for name, field in fields() if not field.get("description")] == []


@pytest.mark.parametrize("base", [{}, BASE], ids=["bundled", "named"])
def test_only_the_given_values_are_set(base: dict[str, Any], tmp_path: Path):
    assert loaded(template(base, ["About."]), tmp_path) == settings.parse({"base_models": [base] if base else []}, "")


@pytest.mark.parametrize("base", [{}, BASE], ids=["bundled", "named"])
def test_each_commented_setting_is_there_once_with_its_default(base: dict[str, Any], tmp_path: Path):
    text = template(base, ["About."])
    names = ["requests_per_s", "tokens_per_s", "concurrent_samples", "live_models", "live_sessions", "storage_bytes"]
    names += ["checkpoint_ttl_s", "monthly_budget"]
    all_set = {**dict.fromkeys(names, 3600), "keep_checkpoints": 1000, "capture_days": 1000}
    uncommented = re.sub(r"^#(?! )", "", text, flags=re.MULTILINE)
    bounded = re.sub("(keep_checkpoints|capture_days) = NUMBER", r"\1 = 1000", uncommented)
    given = bounded.replace("NUMBER", "3600")
    found = loaded(given, tmp_path)
    named = base or {"name": "Qwen/Qwen3-0.6B", "path": "/models/Qwen3-0.6B"}
    prices = dict.fromkeys(asdict(Prices()), 3600)
    more = {"limits": {"project": all_set}, "prices": prices}
    base_models = [{**named, "prices": prices, "full": {}, "full_sampler": {}}]
    assert found == settings.parse({"base_models": base_models, **more}, "")
    keys = {line.partition(" = ")[0] for line in uncommented.splitlines() if not line.startswith(("#", "["))} - {""}
    sections = {"api", "redis", "store", "engine", "limits", "base_models", "project", "prices", "tracing"}
    assert keys == {name for name, _ in fields()} - sections - {"trainer", "sampler", "full", "full_sampler"}


def test_text_fits_80_columns():
    assert max(map(len, template(BASE, ["a sentence of a few words " * 9]).splitlines())) <= 80
