"""The engine's busy time is divided among the requests inside it, by their sequences, and none of it is lost."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest

from workers.sample.device_time import DeviceClock, DeviceTime


class Time:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_is_divided_among_those_inside_by_their_sequences():
    time = Time()
    clock = DeviceClock(2, time)
    with clock.share(1) as alone:
        time.now += 1  # 2 s for the first one, on two devices
        with clock.share(3) as beside:
            time.now += 4  # 8 s: 2 for the first one, 6 for the second
        time.now += 1
    time.now += 100  # nobody is inside
    with clock.share(5) as last:
        time.now += 1
    assert [each.ms for each in (alone, beside, last)] == [6000, 6000, 2000]


def test_a_request_that_failed_leaves_the_clock_right():
    time = Time()
    clock = DeviceClock(1, time)
    with pytest.raises(ValueError, match="failed"), clock.share(7):
        raise ValueError("failed")
    with clock.share(1) as used:
        time.now += 1
    assert used.ms == 1000


def test_all_times_add_up_to_the_busy_time():
    time, chance = Time(), random.Random(5)
    clock, busy = DeviceClock(1, time), 0.0
    inside: list[ExitStack] = []
    found: list[DeviceTime] = []
    for _ in range(400):
        passed = chance.random()
        time.now += passed
        busy += passed if inside else 0
        if inside and chance.random() < 0.5:
            inside.pop(chance.randrange(len(inside))).close()
        else:
            inside.append(ExitStack())
            found.append(inside[-1].enter_context(clock.share(chance.randrange(1, 9))))
    for each in inside:
        each.close()
    assert sum(each.ms for each in found) == pytest.approx(1000 * busy, abs=len(found))
