"""Start-time fair queueing: the next project, given the service that each project received."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import redis

from app.domain.limits import Limits
from workers.process.fair_queue import FairQueue, ProjectWeights


def serve(fair_queue: FairQueue, *waiting: str, cost: float = 1.0) -> str:
    project = min(waiting, key=lambda name: (fair_queue.virtual_time(name), name))
    fair_queue.begin(project)
    fair_queue.charge(project, cost)
    return project


def test_projects_that_always_wait_are_served_alike_whatever_an_op_costs():
    fair_queue, served = FairQueue(), Counter[str]()
    costs = {"cheap": 1.0, "dear": 7.0}
    for _ in range(800):
        project = min(costs, key=fair_queue.virtual_time)
        fair_queue.begin(project)
        fair_queue.charge(project, costs[project])
        served[project] += int(costs[project])
        assert abs(served["cheap"] - served["dear"]) <= 7
    assert served.total() >= 800


def test_service_is_in_proportion_to_the_weights():
    fair_queue = FairQueue({"one": 1.0, "three": 3.0}.__getitem__)
    served = Counter(serve(fair_queue, "one", "three") for _ in range(400))
    assert abs(served["three"] - 300) <= 1


def test_an_idle_project_comes_back_without_credit_for_it():
    fair_queue = FairQueue()
    for _ in range(100):
        serve(fair_queue, "busy", "other")
    back = [serve(fair_queue, "back", "busy", "other") for _ in range(30)]
    assert back[0] == "back" or back[1] == "back", "it waits for a turn, not for its hundred"
    assert all(9 <= count <= 11 for count in Counter(back).values())


def test_a_project_served_alone_owes_newcomers_one_op_at_most():
    fair_queue = FairQueue()
    for _ in range(100):
        serve(fair_queue, "alone")
    assert Counter(serve(fair_queue, "alone", "new") for _ in range(20))["alone"] >= 9


def test_what_was_charged_too_much_is_refunded():
    fair_queue = FairQueue()
    fair_queue.begin("a")
    fair_queue.reserve("a", 100.0)
    serve(fair_queue, "b", cost=100.0)
    fair_queue.settle("a", 100.0, 10.0)
    assert [serve(fair_queue, "a", "b", cost=10.0) for _ in range(9)] == ["a"] * 9


@pytest.mark.parametrize("seed", range(3))
def test_no_project_waits_for_more_than_two_rounds_of_the_others(seed: int):
    """Projects come and go at any time."""
    draw, fair_queue = random.Random(seed), FairQueue()
    names = [f"p{i}" for i in range(8)]
    since: dict[str, int] = {}
    for turn in range(2000):
        waiting = [name for name in names if name in since or draw.random() < 0.3] or [names[0]]
        for name in waiting:
            since.setdefault(name, turn)
        chosen = serve(fair_queue, *waiting)
        assert turn - since.pop(chosen) <= 2 * len(names)


def test_only_projects_ahead_of_the_virtual_time_are_kept():
    fair_queue = FairQueue()
    for i in range(1000):
        serve(fair_queue, f"p{i}", cost=0.5)
        serve(fair_queue, "busy")
    assert len(fair_queue._virtual_times) < 10


def test_a_refund_to_a_waiting_project_is_not_lost_though_others_went_on():
    fair_queue = FairQueue()
    fair_queue.enter("back")
    fair_queue.reserve("back", 100.0)
    fair_queue.charge("other", 100.0)
    fair_queue.begin("other")
    fair_queue.settle("back", 100.0, 10.0)
    assert fair_queue.virtual_time("back") == 10.0
    fair_queue.leave("back")
    assert fair_queue.virtual_time("back") == fair_queue.virtual_time("new"), (
        "once it has nothing that waits it has no credit either"
    )


class Stored:
    def __init__(self) -> None:
        self.weight = 3.0
        self.error: Exception | None = None

    def project(self, project: str) -> Limits:
        if self.error:
            raise self.error
        return Limits(weight=self.weight)


@pytest.mark.parametrize(
    "error", [redis.ConnectionError(), TypeError("unknown limit"), ValueError("keep_checkpoints is 5000")], ids=repr
)
def test_weights_are_those_of_the_limits_and_stay_while_these_cannot_be_read(error: Exception):
    """The state server is away, or a later version has set a limit."""
    stored = Stored()
    weights = ProjectWeights(stored)
    assert weights("known") == 3.0
    stored.error = error
    assert (weights("known"), weights("new")) == (3.0, 1.0)
    stored.error, stored.weight = None, 5.0
    assert weights("known") == 5.0
