"""Divides the rows of an engine's batch among the projects that want them.

A project's share is its part of the rows by weight, and at least one. A project that is alone may have all rows. When
another one wants rows and is below its share, projects above theirs give rows up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """The sequences of one project: `running` of them have a row, and `waiting` want one. `weight` is over 0."""

    weight: float
    running: int
    waiting: int


def shares(weights: Mapping[str, float], rows: int) -> dict[str, int]:
    """Returns the share of each project by its weight, which is over 0."""
    total = sum(weights.values())
    return {project: max(1, int(rows * weight / total)) for project, weight in weights.items()}


def grant(demands: Mapping[str, Demand], rows: int) -> Counter[str]:
    """Returns how many of the free rows each project gets: one after another, to projects below their share first, and
    among these to the one with the fewest rows for its weight."""
    granted, share = Counter[str](), _shares(demands, rows)

    def rank(project: str) -> tuple[bool, float]:
        has = demands[project].running + granted[project]
        return has >= share[project], has / demands[project].weight

    for _ in range(rows - sum(demand.running for demand in demands.values())):
        wanting = [project for project, demand in demands.items() if demand.waiting > granted[project]]
        if not wanting:
            break
        granted[min(wanting, key=rank)] += 1
    return granted


def surplus(demands: Mapping[str, Demand], rows: int) -> Counter[str]:
    """Returns how many rows each project gives up, because others that wait are below their share. Most rows are taken
    from the project that is furthest above its own."""
    share, taken = _shares(demands, rows), Counter[str]()
    free = rows - sum(demand.running for demand in demands.values())
    missing = sum(max(0, min(one.waiting, share[name] - one.running)) for name, one in demands.items())
    for _ in range(missing - max(free, 0)):
        above = {name: one.running - taken[name] - share[name] for name, one in demands.items()}
        furthest = max(above, key=lambda name: above[name])
        if above[furthest] <= 0:
            break
        taken[furthest] += 1
    return taken


def _shares(demands: Mapping[str, Demand], rows: int) -> dict[str, int]:
    return shares({project: demand.weight for project, demand in demands.items()}, rows)
