"""Builds Grafana's JSON of the dashboard."""

from __future__ import annotations

from pathlib import Path
from string import ascii_uppercase

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, SortOrder, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef

from ops.grafana.panels import ROWS, Graph

PATH = Path(__file__).with_name("tinsmith.json")
_SOURCE = DataSourceRef("prometheus", "${source}")
# Grafana's grid is 24 wide: three graphs beside each other.
_WIDTH, _HEIGHT = 8, 8


def text() -> str:
    """The dashboard as JSON."""
    board = (
        dashboard.Dashboard("Tinsmith")
        .uid("tinsmith")
        .tags(["tinsmith"])
        .time("now-3h", "now")
        .refresh("30s")
        .timezone("browser")
        .with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
    )
    for title, graphs in ROWS.items():
        board = board.with_row(dashboard.Row(title))
        for graph in graphs:
            board = board.with_panel(_panel(graph))
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


def _panel(graph: Graph) -> timeseries.Panel:
    legend = common.VizLegendOptions().show_legend(True).calcs([])
    legend = legend.display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    tooltip = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
    panel = timeseries.Panel().title(graph.title).description(graph.about).unit(graph.unit).datasource(_SOURCE)
    for letter, query in zip(ascii_uppercase, graph.queries, strict=False):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(letter)
        panel = panel.with_target(target)
    return panel.min(0).legend(legend).tooltip(tooltip).span(_WIDTH).height(_HEIGHT)
