"""docs/kubernetes.md names the values that the chart has, and all of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.ops.compose import ROOT
from tests.unit.ops.helm.rendered import values
from tests.unit.ops.helm.test_settings import SCHEMA, loaded

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
WORKERS = ("trainer", "sampler", "full", "full_sampler")
NO_VALUES = {
    *("values.yaml", "values.schema.json", "renameByDefault", "baseline", "allowVolumeExpansion"),
    *("tinsmith_backlog", "tinsmith_backlog_age_seconds", "base_model", "role"),
}


def paths(schema: Any, path: str = "") -> Iterator[str]:
    """The paths of the values, without those that are refused. Workers have the names of their values alone."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    for name, part in schema.get("properties", {}).items():
        if part is False:
            continue
        yield path + name
        if name != "resources":  # as in Kubernetes
            yield from paths(part, "" if name in (*WORKERS, "baseModels") else f"{path}{name}.")
    for part in schema.get("allOf", []):
        yield from paths(part, path)
    if not path and "items" in schema:
        yield from paths(schema["items"])


VALUES = set(paths({**SCHEMA, "properties": {**SCHEMA["properties"], "global": False}}))


def test_every_value_that_the_page_names_is_one_of_the_chart():
    text = re.sub(r"^(```|    ).*?^(```|$)", "", PAGE, flags=re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"`([a-z][A-Za-z_]*(?:\.[A-Za-z_]+)*)(?:: [^`]+)?`", text)) - NO_VALUES
    short = {value.rpartition(".")[2] for value in VALUES}
    assert {"keda.enabled", "ageSeconds"} <= named
    assert {name for name in named if name not in (VALUES if "." in name else short)} == set()


def test_every_value_of_the_chart_is_in_the_tables_of_the_page():
    groups = {value.rpartition(".")[0] for value in VALUES}
    tables = PAGE.partition("\n## All values\n")[2].partition("\n## ")[0]
    assert {value for value in VALUES - groups - {*WORKERS} if f"`{value}`" not in tables} == set()


EXAMPLES = re.findall(r"^```text\n((?:baseModels|settings):.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_values_is_rendered_and_its_settings_are_loaded(example: str, tmp_path: Path):
    assert loaded({**values("cpu-demo"), **yaml.safe_load(example)}, tmp_path).base_models
