"""A chart's line and ticks lie where their values are, inside the drawing."""

from __future__ import annotations

import math
import re

import pytest

from app.console.charts import HEIGHT, WIDTH, Chart, charts, number

NUMBER = r"-?[0-9.]+"


def places(chart: Chart, line: int = 0) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(rf"({NUMBER}) ({NUMBER})", chart.lines[line].path)]


def test_higher_values_are_drawn_higher_and_later_steps_further_right() -> None:
    (chart,) = charts({"a": {"loss": [(1, 3.0), (2, 1.0), (4, 2.0)]}})
    (x1, y1), (x2, y2), (x4, y4) = places(chart)
    assert x1 < x2 < x4 and x4 - x2 == pytest.approx(2 * (x2 - x1), abs=0.2)
    assert y1 < y4 < y2 and y2 - y4 == pytest.approx(y4 - y1, abs=0.2)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places(chart))


def test_a_tick_is_at_the_height_of_its_value() -> None:
    (chart,) = charts({"a": {"loss": [(0, 0.0), (10, 1.0)]}})
    (_, low), (_, high) = places(chart)
    at = {tick.label: tick.place for tick in chart.y_ticks}
    assert at["0.0"] == pytest.approx(low, abs=0.1) and at["1.0"] == pytest.approx(high, abs=0.1)
    assert [tick.label for tick in chart.x_ticks] == ["0", "2", "4", "6", "8", "10"]


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 7e4, 3e12])
def test_there_are_a_few_round_ticks_at_every_scale(scale: float) -> None:
    (chart,) = charts({"a": {"loss": [(1, scale), (300, 1.7 * scale)]}})
    assert 3 <= len(chart.y_ticks) <= 7 and 3 <= len(chart.x_ticks) <= 7
    assert len({tick.label for tick in chart.y_ticks}) == len(chart.y_ticks)


def test_a_single_step_and_a_flat_curve_are_drawn() -> None:
    (single,) = charts({"a": {"loss": [(5, 2.0)]}})
    assert places(single) and single.lines[0].last == "2"
    (flat,) = charts({"a": {"loss": [(1, 0.0), (2, 0.0)]}})
    assert len(places(flat)) == 2 and flat.y_ticks


def test_a_value_that_is_not_finite_is_left_out() -> None:
    (chart,) = charts({"a": {"loss": [(1, 1.0), (2, math.nan), (3, math.inf), (4, 2.0)]}})
    assert len(places(chart)) == 2
    (empty,) = charts({"a": {"loss": [(1, math.nan)]}})
    assert empty.lines[0].path == "" and empty.summary == "loss: a has none"


def test_runs_are_compared_at_one_scale_and_a_run_without_a_value_keeps_its_colour() -> None:
    loss, reward = charts({"a": {"loss": [(1, 1.0), (2, 2.0)]}, "b": {"loss": [(1, 2.0)], "reward": [(1, 0.5)]}})
    assert places(loss, 1)[0][1] == places(loss, 0)[1][1]
    assert [line.label for line in reward.lines] == ["a", "b"] and reward.lines[0].path == ""


@pytest.mark.parametrize("values", [(0.0, 1.5e308), (0.0, 5e-324), (1e-320, 1e-320), (-1e300, 1e300)])
def test_extreme_values_do_not_break_the_page(values: tuple[float, float]) -> None:
    (chart,) = charts({"a": {"learning_rate": list(enumerate(values))}})
    assert all(0 <= tick.place <= HEIGHT for tick in chart.y_ticks)


@pytest.mark.parametrize(("low", "high"), [(312.451, 312.455), (1e-13, 1.5e-13), (1e5, 1e5 + 1)])
def test_ticks_that_are_close_together_have_different_labels(low: float, high: float) -> None:
    (chart,) = charts({"a": {"loss": [(1, low), (2, high)]}})
    assert len({tick.label for tick in chart.y_ticks}) == len(chart.y_ticks) >= 3


def test_of_many_values_the_first_are_drawn() -> None:
    names = [f"custom/{number}" for number in range(100)]
    assert [chart.title for chart in charts({"a": {name: [(1, 1.0)] for name in names}})] == names[:32]


def test_a_screen_reader_hears_where_the_curve_begins_and_ends() -> None:
    (chart,) = charts({"a": {"loss": [(1, 3.0), (20, 1.23456)]}})
    assert chart.summary == "loss: a from 3 at step 1 to 1.235 at step 20"


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (1234.5, "1,234"), (12.34567, "12.35"), (1.5e-5, "1.5e-5"), (-2_500_000, "-2.5e6")]
)
def test_a_value_has_at_most_four_digits(value: float, text: str) -> None:
    assert number(value) == text
