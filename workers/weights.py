"""What each project's share is worth, for a worker's queues."""

from __future__ import annotations

import redis

from app.services.limits import LimitsOf


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
