"""Each alert asks metrics that exist, has a runbook, and has tests of its firing and of its silence (`make alerts`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.exported_metrics import exported
from tests.unit.ops.compose import ROOT

PROMETHEUS = ROOT / "ops" / "prometheus"
HELPERS = ROOT / "ops" / "helm" / "tinsmith" / "templates" / "_helpers.tpl"
RUNBOOKS = "docs/runbooks.md"


def load(name: str) -> Any:
    return yaml.safe_load((PROMETHEUS / name).read_text())


def alerts() -> Iterator[dict[str, Any]]:
    for group in load("alerts.yml")["groups"]:
        yield from group["rules"]


ALERTS = {alert["alert"]: alert for alert in alerts()}


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_asks_metrics_that_are_exported(name: str):
    known = set[str]().union(*(metric.samples for metric in exported()))
    asked = set(re.findall(r"tinsmith_[a-z_]+", ALERTS[name]["expr"]))
    assert asked <= known
    assert asked or name in ("TinsmithDown", "TinsmithWorkerDown")


def test_each_alert_has_a_section_of_the_runbooks_and_links_to_it():
    sections = re.findall(r"^## (\w+)$", (ROOT / RUNBOOKS).read_text(), re.MULTILINE)
    assert sections == list(ALERTS)
    links = [alert["annotations"]["runbook_url"] for alert in ALERTS.values()]
    assert links == [f"{RUNBOOKS}#{name.lower()}" for name in ALERTS]


@pytest.mark.parametrize("name", ALERTS)
def test_a_section_says_how_soon_the_alert_needs_somebody(name: str):
    section = (ROOT / RUNBOOKS).read_text().partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    assert section.lstrip().startswith(f"*{ALERTS[name]['labels']['severity']}: ")
    assert section.index("**Look.**") < section.index("**Do.**")


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_is_tested_where_it_fires_and_where_it_is_quiet(name: str):
    cases = [case for test in load("alerts_test.yml")["tests"] for case in test["alert_rule_test"]]
    firing = {bool(case.get("exp_alerts")) for case in cases if case["alertname"] == name}
    assert firing == {True, False}


def test_prometheus_reads_the_alerts_also_in_its_container():
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    mounted = [volume.split(":")[0] for volume in compose["services"]["prometheus"]["volumes"]]
    assert load("prometheus.yml")["rule_files"] == ["alerts.yml"]
    assert "./ops/prometheus/alerts.yml" in mounted


def test_a_worker_may_load_its_model_as_long_as_the_charts_default_before_an_alert_takes_it_for_dead():
    startup_s = int(re.search(r"default (\d+) \.startupSeconds", HELPERS.read_text())[1])
    assert {name: _waits_s(ALERTS[name]) for name in ("TinsmithWorkerDown", "TinsmithUnavailable")} == {
        "TinsmithWorkerDown": startup_s + 300,
        "TinsmithUnavailable": startup_s,
    }
    stalled = ALERTS["TinsmithQueueStalled"]
    assert int(stalled["expr"].rpartition("> ")[2]) + _waits_s(stalled) == startup_s


def _waits_s(alert: dict[str, Any]) -> int:
    return 60 * int(alert["for"].removesuffix("m"))
