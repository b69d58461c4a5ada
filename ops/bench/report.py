"""Report of a benchmark: its figures against its goals, as a JSON file and as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_DIGITS = 4


@dataclass(frozen=True, slots=True)
class Goal:
    """`value` must be at most, or at least, `limit`, both in `unit`."""

    figure: str
    value: float
    sense: Literal["at_most", "at_least"]
    limit: float
    unit: str

    @property
    def met(self) -> bool:
        """A value that is not a number misses every goal."""
        return self.value <= self.limit if self.sense == "at_most" else self.value >= self.limit


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a bench. `figures` is nested plain data, with units in the keys."""

    figures: Mapping[str, Any]
    goals: tuple[Goal, ...]

    @property
    def met(self) -> bool:
        """False without a goal: nothing was shown."""
        return bool(self.goals) and all(goal.met for goal in self.goals)


def write(folder: Path, name: str, outcome: Outcome, surroundings: Mapping[str, Any]) -> Path:
    """Writes `folder`/`name`.json, and replaces an old one."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "bench": name,
        "met": outcome.met,
        "goals": [_goal(goal) for goal in outcome.goals],
        "figures": _rounded(outcome.figures),
        **surroundings,
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def table(outcomes: Mapping[str, Outcome]) -> str:
    """A table with one line per goal."""
    header = ("bench", "figure", "value", "goal", "")
    rows = [header, *(row for name, outcome in outcomes.items() for row in _rows(name, outcome))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _rows(name: str, outcome: Outcome) -> Iterator[tuple[str, ...]]:
    for goal in outcome.goals:
        sign = "<=" if goal.sense == "at_most" else ">="
        value = f"{goal.value:.{_DIGITS}g} {goal.unit}".strip()
        yield name, goal.figure, value, f"{sign} {goal.limit:g}", "met" if goal.met else "MISSED"


def _goal(goal: Goal) -> dict[str, Any]:
    return {
        "figure": goal.figure,
        "value": _rounded(goal.value),
        goal.sense: goal.limit,
        "unit": goal.unit,
        "met": goal.met,
    }


def _rounded(value: Any) -> Any:
    """Rounds floats to 4 significant digits.

    More digits are noise, and make two result files hard to compare. JSON has no nan.
    """
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
