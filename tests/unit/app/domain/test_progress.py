"""A run's loss and rate are those of its newest batch and of the time in which it trains."""

from __future__ import annotations

import numpy as np
import pytest

from app.domain.ops import AdamParams, Batch, ForwardBackward, OptimStep, Ragged
from app.domain.progress import Point, Progress, mean_loss, point_of
from app.domain.results import Done, ForwardBackwardOutput, OptimStepOutput

NOTHING = Ragged.of([], np.float32)


def batch(**inputs: list[float]) -> Batch:
    targets = {"target_tokens": Ragged.of([np.arange(4)], np.int64)}
    given = {name: Ragged.of([np.array(values)], np.float32) for name, values in inputs.items()}
    return Batch(Ragged.of([np.arange(4)], np.int32), targets | given)


def answered(**metrics: float) -> ForwardBackwardOutput:
    return ForwardBackwardOutput(NOTHING, {name.replace("__", ":"): value for name, value in metrics.items()})


def gradient(at: float, loss: float, weight: float = 1.0, tokens: int = 100) -> Point:
    return Point("forward_backward", {"loss:sum": loss}, tokens, weight, seconds=2.0, at=at)


def step(at: float) -> Point:
    return Point("optim_step", {"grad_norm": 1.0}, at=at)


@pytest.mark.parametrize(
    ("loss_fn", "inputs", "weight"),
    [
        ("cross_entropy", {"weights": [0, 0.5, 1, 1]}, 2.5),
        ("cross_entropy", {}, 4),
        ("ppo", {"logprobs": [0, 0, 0, 0], "advantages": [0, 0, -1, 2]}, 2),
    ],
)
def test_the_loss_is_that_of_a_token_that_counts(loss_fn: str, inputs: dict[str, list[float]], weight: float) -> None:
    point = point_of(ForwardBackward(batch(**inputs), loss_fn), answered(loss__sum=5.0))
    assert point is not None and (point.tokens, point.weight, mean_loss([point])) == (4, weight, 5.0 / weight)


def test_a_step_has_its_metrics_and_a_forward_and_a_load_no_point() -> None:
    params = AdamParams(1e-4, 0.9, 0.95, 1e-8)
    assert point_of(OptimStep(params), OptimStepOutput({"grad_norm": 0.25})) == Point("optim_step", {"grad_norm": 0.25})
    assert point_of(ForwardBackward(batch(), "cross_entropy", forward_only=True), answered(loss__sum=1.0)) is None
    assert point_of(object(), Done()) is None


def test_of_many_metrics_a_few_are_kept_and_the_loss_is_one_of_them() -> None:
    metrics = {f"custom/{number}:sum": 1 / 3 for number in range(5000)} | {"loss:sum": 2.0}
    point = point_of(ForwardBackward(batch(), "custom"), ForwardBackwardOutput(NOTHING, metrics))
    assert point is not None and len(point.metrics) == 16 and point.metrics["loss:sum"] == 2.0
    assert point.metrics["custom/0:sum"] == 0.333333


def test_long_names_of_metrics_do_not_make_a_point_large() -> None:
    metrics = {"loss:sum": 1.0, **{f"{number:060}:mean": 2.0 for number in range(20)}}
    point = point_of(OptimStep(AdamParams()), OptimStepOutput(metrics))
    assert point is not None and "loss:sum" in point.metrics
    assert 100 < sum(map(len, point.metrics)) <= 256


def test_the_loss_of_a_run_is_the_mean_over_the_parts_of_its_newest_batch() -> None:
    points = [gradient(1, 99), step(2), gradient(3, 6, weight=2), gradient(4, 3, weight=1), step(5)]
    assert Progress(2, 0, points).loss == 3
    assert Progress(2, 0, points[:3]).loss == 3, "its step has not come yet"
    assert Progress(1, 0, [step(1)]).loss is None and Progress(0, 0, []).loss is None


def test_the_rate_leaves_out_what_was_before_a_pause_and_ends_with_one() -> None:
    before, points = gradient(10, 1), [gradient(1000, 1), step(1001), gradient(1010, 1)]
    assert Progress(1, 0, [before, *points]).tokens_per_s(1011) == 200 / 12
    assert Progress(1, 0, points).tokens_per_s(1010 + 601) is None, "it pauses"
    assert Progress(1, 0, points[:1]).tokens_per_s(1000) == 50, "it took two seconds"
    assert Progress(0, 0, []).tokens_per_s(1000) is None
