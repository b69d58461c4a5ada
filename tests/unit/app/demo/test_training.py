from __future__ import annotations

from itertools import islice

import pytest

from app.demo import training
from app.demo.training import FEWEST_STEPS, MOST_STEPS, learning_rate, steps_in_all


def test_a_fast_machine_takes_all_steps():
    assert steps_in_all([2.0, 1.0], 250.0) == MOST_STEPS


def test_a_slower_one_takes_as_many_as_end_in_time():
    done, left_s, step_s = 3, 150.0, 8.0
    steps = steps_in_all([30.0, step_s, step_s], left_s)
    assert FEWEST_STEPS < steps < MOST_STEPS
    assert (steps - done) * step_s <= left_s < (steps - done + 1) * step_s


@pytest.mark.parametrize("seconds_left", [30.0, 0.0, -100.0])
def test_the_slowest_takes_enough_for_the_habit_however_late_it_is(seconds_left):
    assert steps_in_all([90.0, 60.0], seconds_left) == FEWEST_STEPS


def test_the_first_step_counts_only_while_it_is_the_only_one():
    assert steps_in_all([60.0], 200.0) == FEWEST_STEPS
    assert steps_in_all([60.0, 1.0], 200.0) == MOST_STEPS


def test_a_machine_that_becomes_slower_ends_earlier_and_never_before_now():
    fast = [2.0] * 15
    assert steps_in_all(fast, 100.0) == MOST_STEPS
    assert len(fast) + 1 < steps_in_all([*fast, 50.0], 30.0) < MOST_STEPS
    assert steps_in_all([*fast, 500.0], -400.0) == len(fast) + 1


@pytest.mark.parametrize("steps", [FEWEST_STEPS, MOST_STEPS])
def test_the_learning_rate_falls_from_its_highest_to_a_step_above_zero(steps):
    rates = [learning_rate(done, steps) for done in range(steps)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(rates[0] / steps)


def test_the_fewest_steps_see_every_conversation_twice():
    data = list(range(36))
    seen = [datum for batch in islice(training._batches(data), FEWEST_STEPS) for datum in batch]
    assert sorted(seen) == sorted(data * 2)


class Clock:
    """time.monotonic of a machine on which each step takes `step_s` seconds."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def step(self, *_: object) -> float:
        self.now += self.step_s
        return 4.0


@pytest.mark.parametrize(("step_s", "said"), [(1.0, "24 steps, about 24 s"), (10.0, "20 steps, about 3 minutes")])
def test_training_says_its_plan_and_every_step_and_ends_in_time(step_s, said, monkeypatch, capsys):
    clock = Clock(step_s)
    monkeypatch.setattr(training, "time", clock)
    monkeypatch.setattr(training, "_step", clock.step)
    monkeypatch.setattr(training, "conversations", list)
    monkeypatch.setattr(training, "_batches", lambda data: iter(list, None))
    losses = training.fine_tune(None, None, deadline=clock.now + 200)
    lines = capsys.readouterr().out.splitlines()
    assert clock.now <= 1200
    assert f"  A step takes {step_s} s here: {said}" in lines
    assert len([line for line in lines if line.startswith("  step ") and line.endswith(" loss 4.00")]) == len(losses)
