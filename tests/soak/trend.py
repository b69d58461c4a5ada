"""Decides if a series of measurements grows. It compares medians of quarters, so that no spike or warm-up decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_LEAST = 8


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The last quarter may be above the second one by `share` of it and `amount` more, in the series' unit."""

    share: float
    amount: float


def growth(series: Sequence[float], tolerance: Tolerance) -> str:
    """Fault of the series; empty when it is flat. Fewer than eight values decide nothing."""
    if len(series) < _LEAST:
        return f"only {len(series)} measurements, which say nothing; {_LEAST} are the least"
    quarter = len(series) // 4
    before, after = median(series[quarter : 2 * quarter]), median(series[-quarter:])
    if after <= before * (1 + tolerance.share) + tolerance.amount:
        return ""
    return f"grew from {before:,.0f} to {after:,.0f}"
