"""One Op of a pass: its input columns, its losses datum by datum, and the output of its future."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from app.domain.batch import Ragged
from app.domain.losses import ENTROPY, LOSSES
from app.domain.ops import ForwardBackward
from app.domain.results import CriticOutput, ForwardBackwardOutput
from app.errors import UserOpError
from workers.backends.training.losses import LOSS_FNS
from workers.backends.training.losses.custom import CustomLossRun
from workers.backends.training.microbatches import Column
from workers.backends.training.state import ModelState
from workers.models.lora import Adapter


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A loss of n datums: `losses` fp32 [n]; `metrics` fp32 [n] each; `gradient` in the scores, fp32 [n, L, K]."""

    losses: Tensor
    metrics: dict[str, Tensor]
    gradient: Tensor


@dataclass(slots=True, eq=False)
class Job:
    """One Op of the pass, with its results so far.

    scores: fp32 [all elements of `scored`], the logprobs of the targets, or a critic's values; `datums` holds fp32
    [number of datums] arrays: "bad" (not 0 where the loss, its gradient or a sum among its metrics is not finite),
    "loss:sum" and the metrics. Both lie on the device.
    """

    op: ForwardBackward
    state: ModelState
    tokens: Column
    inputs: dict[str, Column]
    scores: Tensor
    datums: dict[str, Tensor]
    custom: CustomLossRun | None = None

    @classmethod
    def of(cls, op: ForwardBackward, state: ModelState, device: torch.device) -> Job:
        spec = LOSSES[op.loss_fn]
        wanted = {*spec.inputs, *spec.optional}
        inputs = {name: Column(ragged) for name, ragged in op.batch.inputs.items() if name in wanted}
        scores = torch.zeros(len(_scored(op).values), device=device)
        custom = CustomLossRun(op.custom, op.batch) if op.custom else None
        # The metric names are fixed beforehand: a rank without a datum of this Op sums with the ranks that have some.
        metrics = custom.metrics if custom else _metrics(op, inputs)
        datums = {name: torch.zeros(len(op.batch), device=device) for name in ("bad", "loss:sum", *metrics)}
        return cls(op, state, Column(op.batch.tokens), inputs, scores, datums, custom)

    @property
    def adapter(self) -> Adapter | None:
        return self.state.adapter

    @property
    def critic(self) -> bool:
        return LOSSES[self.op.loss_fn].critic

    @property
    def scored(self) -> Column:
        """The column with one score for each element: the targets, or the tokens where a critic gives values."""
        return self.tokens if self.critic else self.inputs["target_tokens"]

    def evaluate(
        self,
        datums: np.ndarray,
        scores: Tensor,
        inputs: dict[str, Tensor],
        real: Tensor,
        entropy: Tensor | None,
    ) -> Evaluation:
        """Computes the loss on these datums (indices); the other arguments as for `evaluate` below."""
        if self.custom is not None:
            return Evaluation(*self.custom.evaluate(datums, scores))
        return evaluate(self.op, scores, inputs, real, entropy)

    def note(self, datums: Tensor, found: Evaluation) -> Tensor:
        """Keeps the results for these datums (indices); returns the gradient, with zeros for the bad ones."""
        sums = [values for name, values in found.metrics.items() if name.endswith(":sum")]
        bad = ~(torch.stack([found.losses, *sums]).isfinite().all(0) & found.gradient.isfinite().all(-1).all(-1))
        self.datums["bad"][datums] = bad.float()
        self.datums["loss:sum"][datums] = found.losses
        for name, values in found.metrics.items():
            self.datums[name][datums] = values
        return torch.where(bad[:, None, None], 0.0, found.gradient)

    def check_finite(self) -> None:
        """Raises UserOpError naming the first datum whose loss, its gradient or its ratio is not finite."""
        bad = self.datums["bad"].nonzero()
        if len(bad):
            datum = int(bad[0])
            if self.custom is not None:
                self.custom.explain(datum, self.scores)
            loss = self.datums["loss:sum"][datum].item()
            raise UserOpError(
                f"datum {datum}: its {self.op.loss_fn} loss is {loss}; the loss, its gradient or a ratio is not "
                "finite. Check its logprobs, weights and advantages. The model is unchanged"
            )

    def output(self) -> ForwardBackwardOutput | CriticOutput:
        """Returns the output of the Op's future."""
        found = {name: t.double().cpu() for name, t in self.datums.items() if name != "bad"}
        metrics = {name: float(_reduce(name, t, 0)) if len(t) else 0.0 for name, t in found.items()}
        metrics["tokens:sum"] = float(sum(self.tokens.lengths))
        scores = Ragged(self.scores.cpu().numpy(), _scored(self.op).shapes)
        return CriticOutput(scores, metrics) if self.critic else ForwardBackwardOutput(scores, metrics)


def asks_entropy(op: ForwardBackward) -> bool:
    return op.loss_config.get(ENTROPY, 0.0) != 0


def evaluate(
    op: ForwardBackward, scores: Tensor, inputs: dict[str, Tensor], real: Tensor, entropy: Tensor | None
) -> Evaluation:
    """Computes the Op's loss on some of its datums, from the small tensors only.

    scores: fp32 [n, L, K], without a graph; `inputs`: by name, of that shape; `real`: True where it is no padding;
    entropy: fp32 [n, L, 1], None unless asked for.
    """
    config = {**LOSSES[op.loss_fn].config, **op.loss_config}
    with torch.enable_grad():
        leaf = scores.detach().requires_grad_()
        value = LOSS_FNS[op.loss_fn](leaf, inputs, config)
        losses = torch.where(real, value.per_token, 0.0).sum((1, 2))
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    own = real[..., :1] if value.own is None else value.own
    metrics = {"loss_tokens:sum": own.float(), **value.metrics}
    if entropy is not None:
        metrics["entropy:sum"] = torch.where(own, entropy, 0.0)
    return Evaluation(losses.detach(), {name: _reduce(name, t, (1, 2)) for name, t in metrics.items()}, gradient)


_REDUCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
    "mean": torch.mean,
}


def _reduce(name: str, values: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """Reduces by the suffix of the metric's name. Only custom losses have a mean, over datums."""
    return _REDUCTIONS[name.rpartition(":")[2]](values, dims)


def _scored(op: ForwardBackward) -> Ragged:
    """Returns the ragged data of `Job.scored`."""
    return op.batch.tokens if LOSSES[op.loss_fn].critic else op.batch.inputs["target_tokens"]


def _metrics(op: ForwardBackward, inputs: Mapping[str, Column]) -> Iterable[str]:
    """Returns the names of the loss's metrics."""
    blank = torch.zeros(0, 1, 1)
    entropy = blank if asks_entropy(op) else None
    return evaluate(op, blank, dict.fromkeys(inputs, blank), blank.bool(), entropy).metrics
