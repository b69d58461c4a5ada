"""Grafana dashboards on Tinsmith's metrics; `python -m ops.grafana` writes their JSON."""
