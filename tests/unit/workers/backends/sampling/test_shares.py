"""Shares of a batch: whoever is alone has all rows, and makes way for others up to their shares."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from workers.backends.sampling.shares import Demand, grant, shares, surplus


def test_shares_follow_the_weights_and_are_at_least_one_row():
    assert shares({"a": 1.0, "b": 1.0, "c": 2.0}, 16) == {"a": 4, "b": 4, "c": 8}
    assert shares({"a": 0.001, "b": 1.0}, 16) == {"a": 1, "b": 15}


def test_a_project_alone_has_all_rows():
    assert grant({"a": Demand(1.0, 3, 99)}, 16) == {"a": 13}
    assert surplus({"a": Demand(1.0, 16, 99)}, 16) == {}


@pytest.mark.parametrize(("wanted", "taken"), [(1, 1), (8, 8), (99, 8)])
def test_a_project_above_its_share_gives_up_what_others_want_up_to_theirs(wanted: int, taken: int):
    demands = {"long": Demand(1.0, 16, 48), "short": Demand(1.0, 0, wanted)}
    assert surplus(demands, 16) == {"long": taken}
    after = {"long": Demand(1.0, 16 - taken, 48 + taken), "short": demands["short"]}
    assert grant(after, 16) == {"short": taken}


def test_free_rows_are_given_before_any_is_taken():
    assert surplus({"long": Demand(1.0, 14, 48), "short": Demand(1.0, 0, 3)}, 16) == {"long": 1}
    assert surplus({"long": Demand(1.0, 14, 48), "short": Demand(1.0, 0, 2)}, 16) == {}


def test_nobody_gives_up_rows_for_a_project_at_its_share():
    assert surplus({"a": Demand(1.0, 8, 9), "b": Demand(1.0, 8, 9)}, 16) == {}


def test_a_row_that_was_given_up_goes_to_a_project_below_its_share_and_not_back():
    """Shares are whole rows: 1 of 1.9, 7 of 7.1, and 3. The giver would take its row back for ever."""
    third = Demand(3.0, 4, 9)
    assert surplus({"giver": Demand(1.9, 2, 9), "other": Demand(7.1, 6, 9), "third": third}, 12) == {"giver": 1}
    assert grant({"giver": Demand(1.9, 1, 10), "other": Demand(7.1, 6, 9), "third": third}, 12) == {"other": 1}


@pytest.mark.parametrize("seed", range(20))
def test_the_rows_settle_and_no_row_goes_to_and_fro(seed: int):
    """Whatever is set aside goes to a project below its share, never back to the project that gave it up."""
    draw = random.Random(seed)
    rows = draw.choice([1, 3, 8, 64])
    weights = {name: draw.choice([0.001, 0.5, 1.0, 7.0]) for name in "abcde"[: draw.randint(1, 5)]}
    running, waiting = Counter[str](), Counter({name: draw.choice([0, 1, 5, 200]) for name in weights})
    for _ in range(rows):  # any start will do
        name = draw.choice(list(weights))
        running[name] += 1
    for turn in range(3):
        demands = {name: Demand(weights[name], running[name], waiting[name]) for name in weights}
        taken = surplus(demands, rows)
        assert not turn or not taken, "one round is enough"
        running.subtract(taken)
        waiting.update(taken)
        granted = grant({name: Demand(weights[name], running[name], waiting[name]) for name in weights}, rows)
        assert not granted & taken
        running.update(granted)
        waiting.subtract(granted)
        assert running.total() == rows
        share = shares(weights, rows)
        if sum(share.values()) <= rows:
            assert all(running[name] >= min(share[name], running[name] + waiting[name]) for name in weights)
