"""Metrics of the API and of a worker, as they are exported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry

from app.telemetry import REGISTRY
from workers.process import telemetry


@dataclass(frozen=True)
class Exported:
    """A metric. `samples`: the names of its samples, without labels."""

    name: str
    help: str
    labels: tuple[str, ...]
    samples: frozenset[str]


def exported() -> list[Exported]:
    """Tinsmith's metrics; one that both processes export is there twice."""
    assert telemetry.OPS, "the workers' metrics are registered when they are imported"
    return [found for registry in (REGISTRY, prometheus_client.REGISTRY) for found in _of(registry)]


def _of(registry: CollectorRegistry) -> list[Exported]:
    found = []
    for collector in registry._collector_to_names:
        metrics: list[Any] = [collector] if hasattr(collector, "_name") else list(_described(collector))
        found += [_exported(metric) for metric in metrics]
    return [metric for metric in found if metric.name.startswith("tinsmith_")]


def _described(collector: Any) -> list[Any]:
    return list(collector.describe()) if hasattr(collector, "describe") else []


def _exported(metric: Any) -> Exported:
    name = getattr(metric, "_name", None) or metric.name
    kind = getattr(metric, "_type", None) or metric.type
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(kind, ("",))
    text = getattr(metric, "_documentation", None) or metric.documentation
    return Exported(
        name + suffixes[0] if len(suffixes) == 1 else name,
        text,
        tuple(metric._labelnames),
        frozenset(name + suffix for suffix in suffixes),
    )
