"""Reported service time of a call, for calls that run alone, together and after a pause."""

from __future__ import annotations

import pytest

from workers.process.telemetry import Pace


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(clock: Clock) -> Pace:
    return Pace(clock)


def test_nothing_is_known_before_the_first(pace: Pace) -> None:
    assert pace.seconds() == 0


def test_calls_one_after_the_other_take_what_each_takes(pace: Pace, clock: Clock) -> None:
    for _ in range(20):
        clock.now += 2
        pace.ended(2.0)
    assert pace.seconds() == pytest.approx(2)


def test_calls_of_one_pass_share_its_time(pace: Pace, clock: Clock) -> None:
    for _ in range(200):
        clock.now += 2
        for _ in range(4):
            pace.ended(2.0)
    assert pace.seconds() == pytest.approx(0.5, rel=0.05)


def test_a_pause_is_no_work(pace: Pace, clock: Clock) -> None:
    for _ in range(20):
        clock.now += 3600
        pace.ended(2.0)
    assert pace.seconds() == pytest.approx(2)


def test_the_last_calls_count_more_than_those_long_ago(pace: Pace, clock: Clock) -> None:
    for seconds in (*[1.0] * 500, *[3.0] * 50):
        clock.now += seconds
        pace.ended(seconds)
    assert 2 < pace.seconds() < 3
