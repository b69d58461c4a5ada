"""Fair queueing among projects that share an engine, by the weights their limits give them.

Start-time fair queueing: each project has a place in virtual time, all it was served over its weight. The least place
is served first, so what projects get that always have something waiting differs by a turn at most. Time goes on with
whoever is served, and takes along the place of who is idle: it comes back level with the others, without credit for
what it did not ask for.
"""

from __future__ import annotations

from collections.abc import Callable

import redis

from app.services.tenants.limits import LimitsOf

# What is left of sums that were added and taken away again.
_NOTHING = 1e-6


def equal(project: str) -> float:
    """Everybody's weight, where nobody's differs."""
    return 1.0


class Shares:
    """One of an engine. One thread at a time may begin and charge, others look meanwhile. `weight_of(project)` is over
    0; costs are in any one unit."""

    def __init__(self, weight_of: Callable[[str], float] = equal) -> None:
        self._weight_of = weight_of
        self._places: dict[str, float] = {}
        """Of those that are ahead of `_now`, or in line; all others are at it."""
        self._in_line: set[str] = set()
        self._lent: dict[str, float] = {}
        """Of what they were charged: what is under way, and may be less in the end."""
        self._now = 0.0

    def place(self, project: str) -> float:
        """The virtual time at which its next turn begins."""
        known = self._places.get(project, 0.0)
        return known if project in self._in_line else max(known, self._now)

    def enter(self, project: str) -> None:
        """It waits until it leaves: what it is given back meanwhile is not lost, wherever the others are."""
        self._places = {**self._places, project: self.place(project)}
        self._in_line.add(project)

    def leave(self, project: str) -> None:
        """It has nothing that waits."""
        self._in_line.discard(project)

    def ahead(self) -> list[str]:
        """Who has had more than the least, in the order of their turns."""
        places = self._places
        return sorted(places, key=lambda project: places[project])

    def begin(self, project: str) -> None:
        """It is served now. Time does not go on by what is lent: who comes would be behind all of it, though most may
        be given back."""
        self._now = max(self._now, self.place(project) - self._lent.get(project, 0.0))

    def lend(self, project: str, cost: float) -> None:
        """It is charged the most that a turn may cost, until that has ended."""
        self._lent[project] = self._lent.get(project, 0.0) + cost / self._weight_of(project)
        self.charge(project, cost)

    def settle(self, project: str, lent: float, cost: float) -> None:
        """What was `lent` for came to `cost`."""
        left = self._lent.pop(project, 0.0) - lent / self._weight_of(project)
        if left > _NOTHING:
            self._lent[project] = left
        self.charge(project, cost - lent)

    def charge(self, project: str, cost: float) -> None:
        """It was served so much; less than nothing gives back what it was charged too much."""
        charged = {**self._places, project: self.place(project) + cost / self._weight_of(project)}
        kept = self._in_line
        self._places = {name: place for name, place in charged.items() if place > self._now or name in kept}


class Weights:
    """While the state server is away they are as they were last, and 1 for who was not seen before: nothing that is
    ordered by them may fail for that."""

    def __init__(self, limits: LimitsOf) -> None:
        self._limits = limits
        self._last: dict[str, float] = {}

    def __call__(self, project: str) -> float:
        try:
            self._last[project] = self._limits.project(project).weight
        except redis.RedisError:
            return self._last.get(project, 1.0)
        return self._last[project]
