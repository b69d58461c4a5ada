"""Mean times between two readings of a Prometheus endpoint."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

Reading = Mapping[tuple[str, frozenset[tuple[str, str]]], float]
STAGES = ("wait", "run", "commit")


def read(url: str) -> Reading:
    """Reads every sample, keyed by name and labels."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def mean_ms(before: Reading, after: Reading, histogram: str, **labels: str) -> float:
    """Mean of the observations between the readings; nan if there are none."""
    key = frozenset(labels.items())
    total, count = (
        after.get((histogram + part, key), 0.0) - before.get((histogram + part, key), 0.0)
        for part in ("_sum", "_count")
    )
    return 1000 * total / count if count else float("nan")


def stages_ms(before: Reading, after: Reading, kind: str) -> dict[str, float]:
    """Means of a trainer's stages: wait (journaled until taken), run (decode, backend, encode) and commit."""
    return {stage: mean_ms(before, after, "tinsmith_op_stage_seconds", kind=kind, stage=stage) for stage in STAGES}
