"""Prices of usage, and the settings sections that have them."""

from __future__ import annotations

import pytest

from app import settings
from app.domain.prices import Prices, total
from app.domain.results import CACHED, DEVICE, PREFILLED, SAMPLED, SAVED, STORED, TRAINED
from app.errors import SetupError

ALL = Prices(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)


def test_each_kind_has_its_price_and_its_unit():
    million, hour_ms, gb_month = 10**6, 3_600_000, 10**9 * 720 * 3600
    units = {TRAINED: million, PREFILLED: million, CACHED: million, SAMPLED: million, DEVICE: hour_ms, STORED: gb_month}
    costs = [ALL.cost(kind, 2 * amount) for kind, amount in units.items()]
    assert costs == pytest.approx([2.0, 4.0, 6.0, 8.0, 10.0, 12.0])
    assert ALL.cost(SAVED, 3) is None


def test_without_a_price_there_is_no_cost():
    assert [Prices().cost(kind, 10**9) for kind in (TRAINED, DEVICE, STORED)] == [None, None, None]
    assert Prices(training=0.0).cost(TRAINED, 5) == 0
    assert (total([None, None]), total([None, 2.0, 0.5]), total([])) == (None, 2.5, None)


def test_a_base_model_has_its_own_prices_and_those_of_all_where_it_has_none():
    base = {"name": "a", "path": "a", "prices": {"sampling": 9}}
    found = settings.parse({"prices": {"training": 1, "sampling": 4}, "base_models": [base]}, "here")
    assert found.prices_of("a") == Prices(training=1, sampling=9)
    assert found.prices_of("no longer served") == Prices(training=1, sampling=4)
    assert settings.parse({}, "here").prices_of("a") == Prices()


@pytest.mark.parametrize("wrong", [{"training": -1}, {"device_hour": float("nan")}, {"tokens": 1}])
def test_a_price_that_makes_no_sense_is_named(wrong):
    with pytest.raises(SetupError, match=next(iter(wrong))):
        settings.parse({"prices": wrong}, "here")
