"""`python -m ops.grafana` writes the dashboard's JSON."""

from __future__ import annotations

from ops.grafana import dashboard

dashboard.PATH.write_text(dashboard.text())
