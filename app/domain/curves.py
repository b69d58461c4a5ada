"""The curves of a run: its optimizer steps, made of the points of its progress, and the metrics that its client
recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from app.domain.ops import FORWARD_BACKWARD
from app.domain.progress import LOSS_SUM, Point, Progress, Recorded, mean_loss

_CLIENT = "client/"
_REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {"sum": sum, "min": min, "max": max}


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step with the batch before it: the forward_backward calls since the step before. `number` counts
    the run's steps from 1. `at`: unix time of its commit. `seconds`: duration of its passes. `loss`: mean of a token;
    None without a loss. `metrics`: those of the batch, and of the step itself."""

    number: int
    at: float
    tokens: int
    seconds: float
    loss: float | None
    metrics: Mapping[str, float]

    def values(self) -> Iterator[tuple[str, float]]:
        """The value of each curve by its name."""
        if self.loss is not None:
            yield "loss", self.loss
        yield from self.metrics.items()
        if self.tokens and self.seconds:
            yield "tokens/s", self.tokens / self.seconds


def steps(progress: Progress) -> list[Step]:
    """The steps that the points hold whole, the oldest first. Calls after the last step are left out."""
    batches: list[list[Point]] = [[]]
    for point in progress.points:
        batches[-1].append(point)
        if point.kind != FORWARD_BACKWARD:
            batches.append([])
    whole = batches[:-1]
    first = progress.steps - len(whole) + 1
    # The points before the oldest ones are gone, maybe with a part of the first batch.
    cut = 1 if first > 1 else 0
    return [_step(first + index, batch) for index, batch in enumerate(whole) if index >= cut]


def by_step(recorded: Sequence[Recorded]) -> dict[int, dict[str, float]]:
    """The metrics that a client recorded for each step, in the order of the steps; the newest value of each counts. The
    prefix keeps them apart from those that training answered."""
    found: dict[int, dict[str, float]] = {}
    for one in recorded:
        found.setdefault(one.step, {}).update({f"{_CLIENT}{name}": value for name, value in one.metrics.items()})
    return dict(sorted(found.items()))


def curves(found: Sequence[Step], recorded: Sequence[Recorded] = ()) -> dict[str, list[tuple[int, float]]]:
    """The curve of each value: (step, value) in the order of the steps. The loss is first, and the client's metrics are
    last."""
    made: dict[str, list[tuple[int, float]]] = {}
    of_training = ((step.number, step.values()) for step in found)
    of_client = ((number, metrics.items()) for number, metrics in by_step(recorded).items())
    for number, values in (*of_training, *of_client):
        for name, value in values:
            made.setdefault(name, []).append((number, value))
    return made


def _step(number: int, batch: Sequence[Point]) -> Step:
    *calls, last = batch
    names = dict.fromkeys(name for call in calls for name in call.metrics if name != LOSS_SUM)
    metrics = {name: _merged(name, [call for call in calls if name in call.metrics]) for name in names}
    tokens, seconds = sum(call.tokens for call in calls), sum(point.seconds for point in batch)
    return Step(number, last.at, tokens, seconds, mean_loss(calls), {**metrics, **last.metrics})


def _merged(name: str, calls: Sequence[Point]) -> float:
    """The metric of a batch: merged by the reduction behind the colon, or else the mean over the tokens. The SDK's mean
    is over the datums, which a point does not count."""
    values = [call.metrics[name] for call in calls]
    reduction = _REDUCTIONS.get(name.rpartition(":")[2])
    if reduction is not None:
        return reduction(values)
    weights = [max(1, call.tokens) for call in calls]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
