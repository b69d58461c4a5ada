"""Weight of a project in the fair queue: as its limits say, even while they cannot be read."""

from __future__ import annotations

import redis

from app.domain.limits import Limits
from workers.process.fair_queue import ProjectWeights


class Stored:
    def __init__(self) -> None:
        self.away, self.weight = False, 3.0

    def project(self, project: str) -> Limits:
        if self.away:
            raise redis.ConnectionError
        return Limits(weight=self.weight)


def test_weights_are_those_of_the_limits_and_stay_while_the_state_server_is_away():
    stored = Stored()
    weights = ProjectWeights(stored)
    assert weights("known") == 3.0
    stored.away = True
    assert (weights("known"), weights("new")) == (3.0, 1.0)
    stored.away, stored.weight = False, 5.0
    assert weights("known") == 5.0
