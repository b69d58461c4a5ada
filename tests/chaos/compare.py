"""Compares two runs: bit for bit, or within a bound where passes held Ops of several models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def differences(expected: Mapping[str, Any], found: Mapping[str, Any], bound: float = 0.0) -> list[str]:
    """Lists the differences: name and both values, cut short. `bound` is relative to an array's greatest value."""
    names = [name for name in sorted({*expected, *found}) if not same(expected.get(name), found.get(name), bound)]
    return [f"{name}: {str(expected.get(name))[-200:]} != {str(found.get(name))[-200:]}" for name in names]


def same(expected: Any, found: Any, bound: float = 0.0) -> bool:
    """Compares numbers and arrays within `bound`, anything else exactly, and containers part by part."""
    if isinstance(expected, np.ndarray | float) and isinstance(found, np.ndarray | float):
        return _close(np.asarray(expected), np.asarray(found), bound)
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        return expected.keys() == found.keys() and all(same(expected[key], found[key], bound) for key in expected)
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        return len(expected) == len(found) and all(same(*pair, bound) for pair in zip(expected, found, strict=True))
    return bool(expected == found)


def _close(expected: np.ndarray, found: np.ndarray, bound: float) -> bool:
    if bound == 0.0 or expected.shape != found.shape:
        return expected.dtype == found.dtype and expected.shape == found.shape and expected.tobytes() == found.tobytes()
    return bool(np.abs(expected - found).max(initial=0.0) <= bound * np.abs(expected).max(initial=0.0))


def distance(expected: Any, found: Any) -> float:
    """Greatest relative difference of any array or number in two results that are otherwise equal."""
    if isinstance(expected, np.ndarray | float) and isinstance(found, np.ndarray | float):
        old, new = np.asarray(expected), np.asarray(found)
        return float(np.abs(old - new).max(initial=0.0) / max(np.abs(old).max(initial=0.0), 1e-30))
    pairs: Sequence[tuple[Any, Any]] = []
    if isinstance(expected, Mapping):
        pairs = [(expected[key], found[key]) for key in expected]
    elif isinstance(expected, list | tuple):
        pairs = list(zip(expected, found, strict=True))
    return max((distance(*pair) for pair in pairs), default=0.0)
