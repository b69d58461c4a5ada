"""Line charts as SVG: scales, ticks and paths. The templates draw them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Points = Sequence[tuple[int, float]]

WIDTH, HEIGHT = 360, 200
MOST = 32
# Beyond these a range has no room, or no ticks, in 64 bits.
_SMALLEST, _LARGEST = 1e-300, 1e300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 8, 8, 24
_TICKS = 5
_MOST_DECIMALS = 4
# A flat curve lies in the middle of a range of its own size.
_FLAT = 0.5


@dataclass(frozen=True, slots=True)
class Tick:
    """A line of the grid, with its place in the drawing and its label."""

    place: float
    label: str


@dataclass(frozen=True, slots=True)
class Line:
    """One run's curve. `path` is SVG path data; `last` is its newest value in words."""

    label: str
    path: str
    last: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One value of one or more runs over their steps. `summary` says the same in words."""

    title: str
    lines: Sequence[Line]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    summary: str


def charts(runs: Mapping[str, Mapping[str, Points]]) -> list[Chart]:
    """A chart for each value that any of the runs has, MOST at most. `runs`: the curves of each run, by the run's
    label."""
    names = list(dict.fromkeys(name for curves in runs.values() for name in curves))[:MOST]
    return [_chart(name, {label: curves.get(name, ()) for label, curves in runs.items()}) for name in names]


def number(value: float) -> str:
    """A value in four digits at most; in three with an exponent below a thousandth and from a million on."""
    if value and not 1e-3 <= abs(value) < 1e6:
        digits, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(exponent)}" if math.isfinite(value) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _chart(title: str, runs: Mapping[str, Points]) -> Chart:
    drawn = {label: [point for point in points if abs(point[1]) <= _LARGEST] for label, points in runs.items()}
    x_low, x_high = _range(step for points in drawn.values() for step, _ in points)
    y_low, y_high = _range(value for points in drawn.values() for _, value in points)

    def x(step: float) -> float:
        return _LEFT + (step - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - (value - y_low) / (y_high - y_low) * (HEIGHT - _TOP - _BOTTOM)

    lines = [
        Line(label, _path([(x(step), y(value)) for step, value in points]), number(points[-1][1]) if points else "")
        for label, points in drawn.items()
    ]
    return Chart(
        title,
        lines,
        [Tick(x(at), label) for at, label in _ticks(x_low, x_high) if at == int(at)],
        [Tick(y(at), label) for at, label in _ticks(y_low, y_high)],
        f"{title}: " + "; ".join(_summary(label, points) for label, points in drawn.items()),
    )


def _range(values: Iterable[float]) -> tuple[float, float]:
    found = list(values) or [0.0]
    low, high = min(found), max(found)
    if low == high:
        margin = _FLAT * abs(low) or _FLAT
        return low - margin, high + margin
    return low, high


def _path(points: Sequence[tuple[float, float]]) -> str:
    """A line through the points; a single one is a dot, which is a line of no length."""
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f"M{path}{'h0' if len(points) == 1 else ''}" if points else ""


def _ticks(low: float, high: float) -> list[tuple[float, str]]:
    """About _TICKS round numbers between both, 1, 2 or 5 times a power of ten apart, with their labels."""
    rough = (high - low) / _TICKS
    if rough < _SMALLEST:
        return []
    power = 10.0 ** math.floor(math.log10(rough))
    gap = next(step * power for step in (1, 2, 5, 10) if step * power >= rough)
    ticks = [index * gap for index in range(math.ceil(low / gap), math.floor(high / gap) + 1)]
    decimals = max(0, -math.floor(math.log10(gap)))
    is_plain = decimals <= _MOST_DECIMALS and abs(high) < 1e6
    return [(at, f"{at:,.{decimals}f}" if is_plain else number(at)) for at in ticks]


def _summary(label: str, points: Points) -> str:
    if not points:
        return f"{label} has none"
    (first, start), (last, end) = points[0], points[-1]
    return f"{label} from {number(start)} at step {first} to {number(end)} at step {last}"
