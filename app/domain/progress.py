"""The progress of a run: points for its curves, made from the results of its committed calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from app.domain.ops import FORWARD_BACKWARD, ForwardBackward, OptimStep
from app.domain.results import CriticOutput, ForwardBackwardOutput, OptimStepOutput, Output

LOSS_SUM = "loss:sum"
# A custom loss may answer thousands of metrics with names of 64 characters, and each run keeps 1,000 points.
MOST_METRICS, _MOST_NAMES = 16, 256
# A longer pause between two calls is no part of the training.
_IDLE_S = 600.0
NEWEST_POINTS = 64
"""Points from which a run's loss and rate are shown: enough for the parts of a large batch, and for a rate that is
steady."""


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the curves: the result of one forward_backward or optim_step.

    `tokens`: those of the batch. `weight`: the sum of their weights in the loss; without weights the number of tokens
    with an advantage, or else of targets. `seconds`: the duration of its pass, which may also run calls
    of other runs. `at`: unix time of the commit by the state server's clock, 0 before it.
    """

    kind: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 0
    weight: float = 0.0
    seconds: float = 0.0
    seq: int = -1
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Recorded:
    """Metrics that a client recorded for a step of its run: the number of an optimizer step from 1, or 0 for a time
    before the first. `event`: the id of the client's event; a repeat has the same. Empty without one."""

    step: int
    metrics: Mapping[str, float]
    event: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run: the optimizer steps and the tokens of its forward_backward calls since it was made, and
    its newest points, the oldest first."""

    steps: int
    trained_tokens: int
    points: Sequence[Point]

    @property
    def loss(self) -> float | None:
        """The mean loss of a token in the newest batch: the last forward_backward calls without a step between
        them. None if they have no weight."""
        batch: list[Point] = []
        for point in reversed(self.points):
            if point.kind == FORWARD_BACKWARD:
                batch.append(point)
            elif batch:
                break
        return mean_loss(batch)

    def tokens_per_s(self, now: float) -> float | None:
        """Trained tokens a second, short pauses between calls included, over the points since the last pause of ten
        minutes; None if the run pauses now."""
        busy: list[Point] = []
        later = now
        for point in reversed(self.points):
            if later - point.at > _IDLE_S:
                break
            busy.append(point)
            later = point.at
        passed = busy[0].at - busy[-1].at + busy[-1].seconds if busy else 0.0
        return sum(point.tokens for point in busy) / passed if passed > 0 else None


def mean_loss(batch: Sequence[Point]) -> float | None:
    """The mean loss of a token in these forward_backward calls; None if they have no weight."""
    weight = sum(point.weight for point in batch)
    return sum(point.metrics.get(LOSS_SUM, 0.0) for point in batch) / weight if weight else None


def described(progress: Progress, now: float) -> str:
    """The progress in a few words, at most 50 characters, at a time of the state server's clock."""
    loss, rate = progress.loss, progress.tokens_per_s(now)
    parts = [f"step {progress.steps}"]
    if loss is not None:
        parts.append(f"loss {loss:.4g}")
    if rate is not None:
        parts.append(f"{rate:.0f} tokens/s")
    return ", ".join(parts)


def point_of(op: object, output: Output) -> Point | None:
    """The point of an Op that ran; None for a kind without one."""
    match op, output:
        case ForwardBackward(forward_only=False), ForwardBackwardOutput() | CriticOutput():
            return Point(op.kind, _bounded(output.metrics), len(op.batch.tokens.values), _weight(op))
        case OptimStep(), OptimStepOutput():
            return Point(op.kind, _bounded(output.metrics))
    return None


def _bounded(metrics: Mapping[str, float]) -> dict[str, float]:
    """At most MOST_METRICS metrics in six digits, with names of _MOST_NAMES characters in all; first the loss."""
    names = sorted(metrics, key=lambda name: name != LOSS_SUM)[:MOST_METRICS]
    ends = accumulate(map(len, names))
    return {name: float(f"{metrics[name]:.6g}") for name, end in zip(names, ends, strict=True) if end <= _MOST_NAMES}


def _weight(op: ForwardBackward) -> float:
    inputs = op.batch.inputs
    if "weights" in inputs:
        return float(np.sum(inputs["weights"].values, dtype=np.float64))
    if "advantages" in inputs:
        return float(np.count_nonzero(inputs["advantages"].values))
    return float(len(inputs["target_tokens"].values))
