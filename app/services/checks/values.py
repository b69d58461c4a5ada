"""Ranges of single numbers."""

from __future__ import annotations

import math

from app.errors import BadRequest


def in_range(name: str, value: float, low: float, high: float = math.inf, *, open_ends: str = "") -> None:
    """`open_ends` holds "(" where `low` itself is refused and ")" where `high` is."""
    above = value > low if "(" in open_ends else value >= low
    below = value < high if ")" in open_ends else value <= high
    finite = isinstance(value, int) or math.isfinite(value)  # isfinite overflows on an int beyond 1e308
    if not (finite and above and below):
        raise BadRequest(f"{name} {_short(value)} is out of range: it must be {_words(low, high, open_ends)}")


def _short(value: float) -> str:
    return f"{value!r:.40}"


def _words(low: float, high: float, open_ends: str) -> str:
    lower = f"above {low}" if "(" in open_ends else f"at least {low}"
    if high == math.inf:
        return f"finite and {lower}"
    return f"{lower} and {'below' if ')' in open_ends else 'at most'} {high}"
