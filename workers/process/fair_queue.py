"""Fair queueing among projects that share an engine, weighted by the projects' limits.

Start-time fair queueing (P. Goyal, H. Vin and H. Cheng, 1996): each project has a place in virtual time, which is all
the service it received divided by its weight. The project with the least place is served first. So the service of
projects that always have something waiting differs by one turn at most. Virtual time advances with the project that is
served, and moves the place of idle projects along: an idle project comes back level with the others, without credit for
service it did not ask for.
"""

from __future__ import annotations

from collections.abc import Callable

import redis

from app.services.tenants.limits import LimitsFinder

# Rounding error that remains of sums that were added and subtracted again.
_NOTHING = 1e-6


def equal(project: str) -> float:
    """The weight of every project where all weights are equal."""
    return 1.0


class FairQueue:
    """The fair queue of one engine. One thread at a time may begin and charge; others may read meanwhile.
    `weight_of(project)` is over 0; costs are in any one unit."""

    def __init__(self, weight_of: Callable[[str], float] = equal) -> None:
        self._weight_of = weight_of
        self._virtual_times: dict[str, float] = {}
        """Virtual times of the projects that are in line or ahead of `_now`. Every other project is at `_now`."""
        self._waiting: set[str] = set()
        self._reserved: dict[str, float] = {}
        """The part of each project's charge that is for running work. The final cost may be lower."""
        self._now = 0.0

    def virtual_time(self, project: str) -> float:
        """The virtual time at which the project's next turn begins."""
        known = self._virtual_times.get(project, 0.0)
        return known if project in self._waiting else max(known, self._now)

    def enter(self, project: str) -> None:
        """Marks the project as waiting until it leaves. While it waits, a refund may move it below the current virtual
        time."""
        self._virtual_times = {**self._virtual_times, project: self.virtual_time(project)}
        self._waiting.add(project)

    def leave(self, project: str) -> None:
        """Records that the project has nothing waiting."""
        self._waiting.discard(project)

    def most_served(self) -> list[str]:
        """The projects that had more service than the least, in the order of their turns."""
        virtual_times = self._virtual_times
        return sorted(virtual_times, key=lambda project: virtual_times[project])

    def begin(self, project: str) -> None:
        """Records that the project is served now. Reserved costs do not advance virtual time: most may be given back,
        and a new project would start behind all of them."""
        self._now = max(self._now, self.virtual_time(project) - self._reserved.get(project, 0.0))

    def reserve(self, project: str, cost: float) -> None:
        """Charges the project the most that a turn may cost, until that turn has ended. `cost` is divided by the
        project's weight already, since the weight may change before `settle`."""
        self._reserved[project] = self._reserved.get(project, 0.0) + cost
        self._add(project, cost)

    def settle(self, project: str, reserved: float, cost: float) -> None:
        """Replaces the `reserved` charge of a turn by its real `cost`, divided by the same weight."""
        left = self._reserved.pop(project, 0.0) - reserved
        if left > _NOTHING:
            self._reserved[project] = left
        self._add(project, cost - reserved)

    def charge(self, project: str, cost: float) -> None:
        """Charges the project `cost`, divided by its weight."""
        self._add(project, cost / self._weight_of(project))

    def _add(self, project: str, time: float) -> None:
        charged = {**self._virtual_times, project: self.virtual_time(project) + time}
        kept = self._waiting
        self._virtual_times = {name: time for name, time in charged.items() if time > self._now or name in kept}


class ProjectWeights:
    """The weights of projects. Each keeps its last known weight, or 1 if it was not seen before, while the state server
    is away and while a later version's limits cannot be read: nothing that is ordered by weights may fail for that."""

    def __init__(self, limits: LimitsFinder) -> None:
        self._limits = limits
        self._last: dict[str, float] = {}

    def __call__(self, project: str) -> float:
        try:
            self._last[project] = self._limits.project(project).weight
        except (redis.RedisError, TypeError, ValueError):
            return self._last.get(project, 1.0)
        return self._last[project]
