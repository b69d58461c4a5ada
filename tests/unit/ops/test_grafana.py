"""The dashboard is made from the code, and asks only metrics that are exported. `make dashboards` runs its queries."""

from __future__ import annotations

import json
import re

from ops.grafana import dashboard
from tests.exported_metrics import exported

BOARD = json.loads(dashboard.PATH.read_text())
GRAPHS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
ASKED = {
    name for graph in GRAPHS for target in graph["targets"] for name in re.findall(r"tinsmith_[a-z_]+", target["expr"])
}


def test_the_committed_dashboard_is_made_from_the_code():
    assert dashboard.PATH.read_text() == dashboard.text(), "run `python -m ops.grafana`"


def test_each_query_asks_metrics_that_are_exported():
    assert set[str]().union(*(metric.samples for metric in exported())) >= ASKED


def test_each_metric_has_a_graph():
    assert [metric.name for metric in exported() if metric.samples.isdisjoint(ASKED)] == []


def test_each_graph_is_explained_and_has_a_place_of_its_own():
    assert all(graph["description"] and graph["targets"] for graph in GRAPHS)
    places = {(graph["gridPos"]["x"], graph["gridPos"]["y"]) for graph in GRAPHS}
    assert len(places) == len({graph["title"] for graph in GRAPHS}) == len(GRAPHS)


def test_gpus_with_the_same_number_on_different_machines_are_shown_apart():
    targets = [target for graph in GRAPHS for target in graph["targets"] if "tinsmith_gpu_" in target["expr"]]
    assert len(targets) == 3
    for target in targets:
        assert re.search(r"by \(([^)]*)\)", target["expr"])[1] == "instance, gpu"
        assert "{{instance}}" in target["legendFormat"]
