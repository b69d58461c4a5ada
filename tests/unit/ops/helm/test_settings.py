"""Every setting can be given to the processes by the chart's values or by its Secret."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_python
import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from app.settings import Settings, hash_key, load
from ops.helm import chart
from tests.unit.ops.helm.rendered import environment, values

SCHEMA = json.loads((chart.CHART / "values.schema.json").read_text())
GIVEN = {
    "api": {"processes": 2, "queue_metrics_by_project": True, "tokenizers": "served"},
    "engine": {"lease_s": 20.5, "journal_bytes": 4_294_967_296},
    "limits": {"datums": 4096, "project": {"monthly_budget": 250.5, "storage_bytes": 10**12, "capture_days": 30}},
    "prices": {"training": 1.25, "cached_prefill": 1e-7, "device_hour": 2.0},
    "tracing": {"endpoint": "http://collector.observability:4318"},
}
"""Values of each section of the chart's `settings`."""
ELSEWHERE = {
    "data_dir": "a volume of each pod (`data`)",
    "api_keys": "api-key of the Secret",
    "operator_keys": "operator-key of the Secret",
    "url_secret": "url-secret of the Secret",
    "capture_secret": "capture-secret of the Secret",
    "redis.url": "the bundled Valkey, or redis-url of the Secret",
    "redis.broker_url": "the bundled broker, or broker-url of the Secret",
    "store.url": "the bundled MinIO, or `store.url`",
    "store.public_url": "`store.publicUrl`",
    "store.region": "`store.region`",
    "store.access_key": "s3-access-key of the Secret",
    "store.secret_key": "s3-secret-key of the Secret",
    "base_models": "`baseModels`",
}
"""The settings that are no section of the chart's `settings`, each with its origin."""


def fields(section: type[BaseModel], below: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """The settings of a section and of those in it, without lists of sections."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation, f"{below}{name}.")
        else:
            yield below + name, field


def loaded(given: Mapping[str, Any], folder: Path) -> Settings:
    """The settings that the API loads from the chart with these values, and "hush" in each secret."""
    manifests = chart.render(given)
    (config,) = [one["data"] for one in manifests if one["metadata"]["name"] == "tinsmith-settings"]
    (api,) = [container for one in manifests for container in chart.containers(one) if container["name"] == "api"]
    file = folder / "tinsmith.toml"
    file.write_text(config["tinsmith.toml"])
    return load(file, environment(api))


def contains(found: Any, given: Any) -> bool:
    if isinstance(given, Mapping):
        return all(contains(found[name], value) for name, value in given.items())
    return bool(found == given)


def test_a_value_of_each_section_reaches_the_processes(tmp_path: Path):
    found = loaded({**values("cpu-demo"), "settings": GIVEN}, tmp_path).model_dump(mode="json")
    assert contains(found, GIVEN)


def test_prices_of_a_base_model_reach_the_processes(tmp_path: Path):
    given = values("cpu-demo")
    (base,) = given["baseModels"]
    base["settings"] = {"max_context": 2048, "prices": {"sampling": 2.5}}
    found = loaded({**given, "settings": GIVEN}, tmp_path)
    assert found.base_models[0].max_context == 2048
    prices = found.prices_of(base["name"])
    assert (prices.sampling, prices.training) == (2.5, 1.25)


def test_every_setting_is_in_a_section_of_the_chart_or_comes_from_elsewhere():
    sections = SCHEMA["properties"]["settings"]["properties"].keys()
    assert sections == GIVEN.keys()
    assert {path for path, _ in fields(Settings) if path.partition(".")[0] not in sections} == ELSEWHERE.keys()


def test_every_secret_of_the_settings_comes_from_the_secret_of_the_cluster(tmp_path: Path):
    found = loaded(values("cpu-demo"), tmp_path)
    # The URL of a collector may be a value: OpenTelemetry reads its key from otlp-headers of the Secret.
    secrets = {path for path, field in fields(Settings) if not field.repr} - {"tracing.endpoint"}
    assert secrets == {path for path, origin in ELSEWHERE.items() if "of the Secret" in origin}
    assert set(found.api_keys) == set(found.operator_keys) == {hash_key("tml-hush-hush")}
    assert found.url_secret == found.capture_secret == found.store.access_key == found.store.secret_key == "hush"
    assert found.redis.url.startswith("redis://:hush@") and found.redis.broker_url.startswith("redis://:hush@")


def test_processes_that_trace_have_the_key_of_the_collector():
    every = [one for manifest in chart.render(values("cpu-demo")) for one in chart.containers(manifest)]
    traced = [one for one in every if one["name"] in ("api", "worker")]
    assert [one["name"] for one in traced] == ["api", "worker", "worker"]
    assert [environment(one)["OTEL_EXPORTER_OTLP_HEADERS"] for one in traced] == ["hush"] * 3


def test_values_that_toml_writes_otherwise_than_json_reach_the_processes(tmp_path: Path):
    given = values("cpu-demo")
    (base,) = given["baseModels"]
    arguments = {"a b": [{"c.d": [1, "two"]}], "e.f": {"g": True}}
    base["sampler"]["settings"] = {"engine_args": arguments}
    given["settings"] = {"limits": {"datums": None}, "engine": {"handover_bytes": 5}}
    found = loaded(given, tmp_path)
    assert found.base_models[0].sampler.engine_args == arguments
    assert found.limits.datums == Settings().limits.datums
    assert found.engine.handover_bytes == 0, "no volume is shared"


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("settings.api", "host"),
        ("settings.api", "port"),
        ("settings.api", "public_url"),
        ("settings.engine", "handover_dir"),
        ("trainer.settings", "count"),
        ("trainer.settings", "devices"),
        ("trainer.settings", "hostfile"),
        ("sampler.settings", "metrics_port"),
        *(("base", key) for key in ("name", "path", "trainer", "sampler", "full", "full_sampler")),
    ],
)
def test_a_setting_that_the_chart_itself_sets_is_refused_by_name(section: str, key: str):
    given = values("cpu-demo")
    (base,) = given["baseModels"]
    part, _, name = section.partition(".")
    places = {"settings": given.setdefault("settings", {}), "base": base, **base}
    places[part].setdefault(name or "settings", {})[key] = 0
    with pytest.raises(helm_python.HelmError, match=key):
        chart.render(given)


def test_variables_of_the_api_are_set_in_it():
    variables = {"OTEL_TRACES_SAMPLER": "always_off", "ON": "1"}
    manifests = chart.render({**values("cpu-demo"), "api": {"env": variables}})
    (api,) = [container for one in manifests for container in chart.containers(one) if container["name"] == "api"]
    assert contains(environment(api), variables)


def test_a_variable_that_the_secret_gives_is_no_value():
    with pytest.raises(helm_python.HelmError, match="TINSMITH_OPERATOR_KEY"):
        chart.render({**values("cpu-demo"), "api": {"env": {"TINSMITH_OPERATOR_KEY": "tml-seen-by-all"}}})
