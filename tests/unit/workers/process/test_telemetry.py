"""Reported service time of a call, for calls that run alone, together and after a pause."""

from __future__ import annotations

import pytest

from workers.process.telemetry import ServiceTime


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service_time(clock: Clock) -> ServiceTime:
    return ServiceTime(clock)


def test_nothing_is_known_before_the_first(service_time: ServiceTime) -> None:
    assert service_time.seconds() == 0


def test_calls_one_after_the_other_take_what_each_takes(service_time: ServiceTime, clock: Clock) -> None:
    for _ in range(20):
        clock.now += 2
        service_time.ended(2.0)
    assert service_time.seconds() == pytest.approx(2)


def test_calls_of_one_pass_share_its_time(service_time: ServiceTime, clock: Clock) -> None:
    for _ in range(200):
        clock.now += 2
        for _ in range(4):
            service_time.ended(2.0)
    assert service_time.seconds() == pytest.approx(0.5, rel=0.05)


def test_a_pause_is_no_work(service_time: ServiceTime, clock: Clock) -> None:
    for _ in range(20):
        clock.now += 3600
        service_time.ended(2.0)
    assert service_time.seconds() == pytest.approx(2)


def test_the_last_calls_count_more_than_those_long_ago(service_time: ServiceTime, clock: Clock) -> None:
    for seconds in (*[1.0] * 500, *[3.0] * 50):
        clock.now += seconds
        service_time.ended(seconds)
    assert 2 < service_time.seconds() < 3
