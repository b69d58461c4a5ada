from __future__ import annotations

import random

import pytest

from tests.soak.measure import TOLERANCES
from tests.soak.trend import Tolerance, growth

TIGHT = Tolerance(0.05, 10)


def test_a_flat_noisy_series_is_fine():
    noise = random.Random(1)
    assert growth([1000 + noise.uniform(-30, 30) for _ in range(60)], TIGHT) == ""


def test_a_series_that_grows_slowly_is_found():
    noise = random.Random(2)
    assert growth([1000 + 3 * at + noise.uniform(-30, 30) for at in range(60)], TIGHT).startswith("grew from 1,0")


@pytest.mark.parametrize("name", TOLERANCES)
def test_every_tolerance_finds_a_leak_of_one_part_in_sixty(name: str):
    """Each leak doubles its value within a run, from a usual size."""
    usual = {"keys": 500, "bytes": 8 * 2**20, "disk": 32 * 2**20, "anon": 300 * 2**20, "fds": 40, "threads": 30}[name]
    assert growth([usual * (1 + at / 60) for at in range(60)], TOLERANCES[name])


def test_neither_the_warm_up_nor_a_spike_counts():
    series = [200.0] * 10 + [1000.0] * 50
    series[55] = 50_000
    assert growth(series, TIGHT) == ""


def test_a_few_measurements_prove_nothing():
    assert "only 7" in growth([1.0] * 7, TIGHT)
