"""The engine's busy time is divided among the requests inside it, by their sequences, and none of it is lost."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest

from workers.backends.sampling.base import RequestHandle
from workers.sample.device_time import DeviceClock


class Time:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_is_divided_among_those_inside_by_their_sequences():
    time = Time()
    clock, (alone, beside, last) = DeviceClock(2, time), (RequestHandle() for _ in range(3))
    with clock.share(1, alone):
        time.now += 1  # 2 s for the first one, on two devices
        with clock.share(3, beside):
            time.now += 4  # 8 s: 2 for the first one, 6 for the second
        time.now += 1
    time.now += 100  # nobody is inside
    with clock.share(5, last):
        time.now += 1
    assert [each.device_ms for each in (alone, beside, last)] == [6000, 6000, 2000]


def test_a_request_that_failed_leaves_the_clock_right():
    time = Time()
    clock, failed, used = DeviceClock(1, time), RequestHandle(), RequestHandle()
    with pytest.raises(ValueError, match="failed"), clock.share(7, failed):
        time.now += 1
        raise ValueError("failed")
    with clock.share(1, used):
        time.now += 2
    assert (failed.device_ms, used.device_ms) == (1000, 2000)


def test_all_times_add_up_to_the_busy_time():
    time, chance = Time(), random.Random(5)
    clock, busy = DeviceClock(1, time), 0.0
    inside: list[ExitStack] = []
    found: list[RequestHandle] = []
    for _ in range(400):
        passed = chance.random()
        time.now += passed
        busy += passed if inside else 0
        if inside and chance.random() < 0.5:
            inside.pop(chance.randrange(len(inside))).close()
        else:
            inside.append(ExitStack())
            found.append(RequestHandle())
            inside[-1].enter_context(clock.share(chance.randrange(1, 9), found[-1]))
    for each in inside:
        each.close()
    assert sum(each.device_ms for each in found) == pytest.approx(1000 * busy, abs=len(found))
