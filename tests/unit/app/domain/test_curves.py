"""The curves of a run show its whole steps, each with the batch before it."""

from __future__ import annotations

import pytest

from app.domain.curves import curves, steps
from app.domain.progress import Point, Progress, Recorded


def call(loss: float, weight: float = 1.0, tokens: int = 100, **metrics: float) -> Point:
    named = {name.replace("__", ":"): value for name, value in metrics.items()}
    return Point("forward_backward", {"loss:sum": loss, **named}, tokens, weight, seconds=2.0)


def step(at: float = 0.0) -> Point:
    return Point("optim_step", {"grad_norm": 0.5}, seconds=1.0, at=at)


def test_a_step_has_the_loss_of_a_token_over_its_whole_batch() -> None:
    (found,) = steps(
        Progress(1, 400, [call(6.0, weight=2.0, tokens=100), call(2.0, weight=6.0, tokens=300), step(7.0)])
    )
    assert (found.number, found.at, found.tokens, found.seconds, found.loss) == (1, 7.0, 400, 5.0, 1.0)
    assert dict(found.values()) == {"loss": 1.0, "grad_norm": 0.5, "tokens/s": 80.0}


@pytest.mark.parametrize(
    ("name", "merged"), [("kl__sum", 9.0), ("kl__max", 7.0), ("kl__min", 2.0), ("kl__mean", 3.25), ("kl", 3.25)]
)
def test_a_metric_of_several_calls_is_merged_by_its_reduction(name: str, merged: float) -> None:
    batch = [call(1.0, tokens=300, **{name: 2.0}), call(1.0, tokens=100, **{name: 7.0}), call(1.0, tokens=900), step()]
    (found,) = steps(Progress(1, 0, batch))
    assert found.metrics[name.replace("__", ":")] == merged


def test_metrics_of_a_client_are_curves_of_their_own_by_their_step() -> None:
    recorded = [
        Recorded(2, {"reward": 1.0, "loss": 7.0}),
        Recorded(0, {"reward": 0.25}),
        Recorded(2, {"reward": 1.5}),
    ]
    found = curves(steps(Progress(1, 0, [call(3.0), step()])), recorded)
    assert found["loss"] == [(1, 3.0)] and found["client/loss"] == [(2, 7.0)]
    assert found["client/reward"] == [(0, 0.25), (2, 1.5)], "in the order of the steps, with the newest value of each"
    assert list(found)[-2:] == ["client/reward", "client/loss"]


def test_calls_that_no_step_has_followed_are_no_step() -> None:
    assert steps(Progress(0, 0, [call(1.0)])) == []
    assert [one.number for one in steps(Progress(1, 0, [call(1.0), step(), call(2.0)]))] == [1]


def test_a_step_whose_batch_may_be_cut_off_is_left_out() -> None:
    """Three steps were made, and the points begin within the second."""
    found = steps(Progress(3, 0, [call(1.0), step(), call(2.0), step()]))
    assert [(one.number, one.loss) for one in found] == [(3, 2.0)]


def test_curves_hold_each_value_by_the_number_of_its_step_and_the_loss_is_first() -> None:
    found = curves(steps(Progress(3, 0, [call(3.0), step(), step(), call(1.0, weight=0.0, reward=5.0), step()])))
    assert next(iter(found)) == "loss"
    assert found["loss"] == [(1, 3.0)]
    assert found["grad_norm"] == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert found["reward"] == [(3, 5.0)]
