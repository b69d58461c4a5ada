"""Time samples, taken from several sides in alternation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def timed_ms(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1000


def summary(samples: Sequence[float]) -> dict[str, float]:
    """p50, p95, best and number of `samples`."""
    p50, p95 = np.percentile(samples, (50, 95))
    return {"p50": float(p50), "p95": float(p95), "best": min(samples), "count": len(samples)}


def alternate(rounds: int, sides: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Calls every side once per round, so that a noisy period affects all of them."""
    found: dict[str, list[T]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, measure in sides.items():
            found[name].append(measure())
    return found
