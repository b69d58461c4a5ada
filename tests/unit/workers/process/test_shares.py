"""Start-time fair queueing: the next project, given the service that each project received."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from workers.process.fair_queue import Shares


def serve(shares: Shares, *waiting: str, cost: float = 1.0) -> str:
    project = min(waiting, key=lambda name: (shares.place(name), name))
    shares.begin(project)
    shares.charge(project, cost)
    return project


def test_whoever_always_waits_is_served_alike_whatever_a_turn_costs():
    shares, served = Shares(), Counter[str]()
    costs = {"cheap": 1.0, "dear": 7.0}
    for _ in range(800):
        project = min(costs, key=shares.place)
        shares.begin(project)
        shares.charge(project, costs[project])
        served[project] += int(costs[project])
        assert abs(served["cheap"] - served["dear"]) <= 7
    assert served.total() >= 800


def test_a_weight_is_a_share():
    shares = Shares({"one": 1.0, "three": 3.0}.__getitem__)
    served = Counter(serve(shares, "one", "three") for _ in range(400))
    assert abs(served["three"] - 300) <= 1


def test_who_was_idle_comes_back_level_without_credit_for_it():
    shares = Shares()
    for _ in range(100):
        serve(shares, "busy", "other")
    back = [serve(shares, "back", "busy", "other") for _ in range(30)]
    assert back[0] == "back" or back[1] == "back", "it waits for a turn, not for its hundred"
    assert all(9 <= count <= 11 for count in Counter(back).values())


def test_who_was_served_alone_owes_those_who_come_a_turn_at_most():
    shares = Shares()
    for _ in range(100):
        serve(shares, "alone")
    assert Counter(serve(shares, "alone", "new") for _ in range(20))["alone"] >= 9


def test_what_was_charged_too_much_is_given_back():
    shares = Shares()
    for name in ("a", "b"):
        serve(shares, name, cost=100.0)
    shares.charge("a", -90.0)
    assert [serve(shares, "a", "b", cost=10.0) for _ in range(9)] == ["a"] * 9


@pytest.mark.parametrize("seed", range(3))
def test_nobody_is_passed_over_for_longer_than_everybody_elses_turn(seed: int):
    """Projects come and go at any time."""
    draw, shares = random.Random(seed), Shares()
    names = [f"p{i}" for i in range(8)]
    since: dict[str, int] = {}
    for turn in range(2000):
        waiting = [name for name in names if name in since or draw.random() < 0.3] or [names[0]]
        for name in waiting:
            since.setdefault(name, turn)
        chosen = serve(shares, *waiting)
        assert turn - since.pop(chosen) <= 2 * len(names)


def test_only_those_who_are_ahead_are_kept():
    shares = Shares()
    for i in range(1000):
        serve(shares, f"p{i}", cost=0.5)
        serve(shares, "busy")
    assert len(shares._places) < 10


def test_what_is_given_back_to_one_in_line_is_not_lost_though_others_went_on():
    shares = Shares()
    shares.enter("back")
    shares.charge("back", 100.0)
    shares.charge("other", 100.0)
    shares.begin("other")
    shares.charge("back", -90.0)
    assert shares.place("back") == 10.0
    shares.leave("back")
    assert shares.place("back") == shares.place("new"), "once it has nothing that waits it has no credit either"
