"""One Op of a pass: its datums, cut into micro-batches and blocks, its losses datum by datum, and the output of its
future.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod

import numpy as np
import torch
from torch import Tensor

from app.domain import routes
from app.domain.images import Image
from app.domain.losses import ENTROPY, LOSSES
from app.domain.ops import ForwardBackward, Ragged
from app.domain.results import CriticOutput, ForwardBackwardOutput
from app.errors import UserOpError
from workers.backends.training.losses import LOSS_FNS
from workers.backends.training.losses.custom import CustomLossRun
from workers.backends.training.states.base import ModelState
from workers.models.adapter import Adapter
from workers.models.routers import NO_ROUTE, load_metrics

_Row = tuple[int, int, int]
"""(job, datum, number of tokens in the datum)."""


@dataclass(frozen=True, slots=True)
class Share:
    """The datums of one job, by index, in one micro-batch; `lengths` are their token counts. `job` is an index too."""

    job: int
    datums: np.ndarray
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Whole datums, share after share, with their tokens end to end."""

    shares: tuple[Share, ...]

    @property
    def lengths(self) -> list[int]:
        return [length for share in self.shares for length in share.lengths]

    def blocks(self, limit: int) -> Iterator[tuple[slice, MicroBatch]]:
        """Yields consecutive datums of at most `limit` tokens (a longer datum goes alone), with their tokens' slice."""
        rows = [
            (share.job, int(datum), length)
            for share in self.shares
            for datum, length in zip(share.datums, share.lengths, strict=True)
        ]
        end = 0
        for block in _grouped(rows, limit, packed=True):
            start, end = end, end + sum(length for _, _, length in block)
            yield slice(start, end), _micro_batch(block)


def cut(lengths: Sequence[Sequence[int]], limit: int, *, packed: bool) -> list[MicroBatch]:
    """Takes every datum once, longest first, at most `limit` tokens a micro-batch (a longer datum goes alone).

    `lengths` holds the datums' token counts, Op by Op. Unless `packed`, a datum counts as the longest beside it. With
    one Op the cut depends on its own lengths alone, and neighbours are of similar length.
    """
    rows = [(op, datum, n) for op, ns in enumerate(lengths) for datum, n in enumerate(ns)]
    rows.sort(key=lambda row: (-row[2], row[0], row[1]))
    return [_micro_batch(group) for group in _grouped(rows, limit, packed=packed)]


def _grouped(rows: Sequence[_Row], limit: int, *, packed: bool) -> Iterator[list[_Row]]:
    group: list[_Row] = []
    tokens = longest = 0
    for row in rows:
        longest = max(longest, row[2])
        cost = tokens + row[2] if packed else (len(group) + 1) * longest
        if group and cost > limit:
            yield group
            group, tokens, longest = [], 0, row[2]
        group.append(row)
        tokens += row[2]
    if group:
        yield group


def _micro_batch(rows: Sequence[_Row]) -> MicroBatch:
    """Groups the rows by Op; within one Op, the order of `rows` is kept."""
    shares = []
    for op, group in groupby(sorted(rows, key=lambda row: row[0]), key=lambda row: row[0]):
        _, datums, lengths = zip(*group, strict=True)
        shares.append(Share(op, np.array(datums), lengths))
    return MicroBatch(tuple(shares))


class Column:
    """One input of all datums of an Op, read as padded blocks. Arrays are [n] or [n, k]."""

    def __init__(self, ragged: Ragged) -> None:
        self._ragged = ragged
        self._starts = np.array(ragged.offsets())
        self._sizes = np.array([prod(shape) for shape in ragged.shapes], dtype=np.int64)
        self._widths = np.array([shape[1] if len(shape) > 1 else 1 for shape in ragged.shapes], dtype=np.int64)

    @cached_property
    def lengths(self) -> list[int]:
        return [shape[0] for shape in self._ragged.shapes]

    def width(self, datums: np.ndarray) -> int:
        """Returns the widest k of these datums, 1 for arrays [n]."""
        return int(self._widths[datums].max())

    def flat(self, datums: np.ndarray) -> np.ndarray:
        """Returns the arrays of these datums, each [n, ...], end to end."""
        found: np.ndarray = np.concatenate([self._ragged.values[self._starts[i] : self._starts[i + 1]] for i in datums])
        return found.reshape(-1, *self._ragged.shapes[0][1:])

    def positions(self, datums: np.ndarray, length: int) -> np.ndarray:
        """Returns int64 [datums, length, widest k]: the index of each element in the ragged values, -1 for padding."""
        widths = self._widths[datums, None, None]
        row, lane = np.arange(length)[None, :, None], np.arange(self.width(datums))[None, None, :]
        within = row * widths + lane
        real = (lane < widths) & (within < self._sizes[datums, None, None])
        return np.where(real, self._starts[datums, None, None] + within, -1)

    def block(self, datums: np.ndarray, length: int) -> np.ndarray:
        """Returns [datums, length, widest k] with 0 for padding, in the column's dtype."""
        where = self.positions(datums, length)
        values = self._ragged.values
        return np.where(where >= 0, values[where], values.dtype.type(0)) if len(values) else np.zeros_like(where)


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
    "loss:sum" and the metrics. load: the tokens that each expert got, fp32 [layers, experts]; None without known
    routers. Ranks that all run the same tokens each count them, so only its ratios have a meaning. All lie on the
    device until they are fetched.
    """

    op: ForwardBackward
    state: ModelState
    tokens: Column
    inputs: dict[str, Column]
    scores: Tensor
    datums: dict[str, Tensor]
    custom: CustomLossRun | None = None
    routes: Column | None = None
    load: Tensor | None = None

    @classmethod
    def of(cls, op: ForwardBackward, state: ModelState, device: torch.device) -> Job:
        spec = LOSSES[op.loss_fn]
        wanted = {*spec.inputs, *spec.optional}
        inputs = {name: Column(ragged) for name, ragged in op.batch.inputs.items() if name in wanted}
        scores = torch.zeros(len(_score_layout(op).values), device=device)
        custom = CustomLossRun(op.custom, op.batch) if op.custom else None
        # The metric names are fixed beforehand: a rank without a datum of this Op sums with the ranks that have some.
        metrics = custom.metrics if custom else _metrics(op, inputs)
        names = ("bad", "loss:sum", *metrics)
        datums = dict(zip(names, torch.zeros(len(names), len(op.batch), device=device), strict=True))
        given = None if op.batch.routes is None else Column(op.batch.routes)
        return cls(op, state, Column(op.batch.tokens), inputs, scores, datums, custom, given)

    @property
    def adapter(self) -> Adapter | None:
        return self.state.adapter

    @property
    def critic(self) -> bool:
        return LOSSES[self.op.loss_fn].critic

    def images(self, datum: int) -> Sequence[Image]:
        """Returns the images of a datum, by their positions."""
        return [image for image in self.op.batch.images if image.datum == datum]

    @property
    def score_column(self) -> Column:
        """The column with one score for each element: the targets, or the tokens where a critic gives values."""
        return self.tokens if self.critic else self.inputs["target_tokens"]

    def routes_of(self, share: Share) -> np.ndarray | None:
        """Returns the given experts, int64 [tokens of the share, layers, top_k], NO_ROUTE where none are given."""
        if self.routes is None:
            return None
        stored = self.routes.flat(share.datums)
        return np.where(stored == routes.none_of(stored.dtype), NO_ROUTE, stored.astype(np.int64))

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

    def error(self) -> UserOpError | None:
        """Returns the reason why the Op fails after its pass, or None."""
        try:
            self._check_finite()
        except UserOpError as error:
            return error
        return None

    def _check_finite(self) -> None:
        """Raises UserOpError naming the first datum whose loss, its gradient or its ratio is not finite."""
        bad = self.datums["bad"].nonzero()
        if len(bad):
            datum = int(bad[0])
            if self.custom is not None:
                self.custom.explain(datum, self.scores)
            loss = self.datums["loss:sum"][datum].item()
            raise UserOpError(
                f"datum {datum}: its {self.op.loss_fn} loss is {loss}. Non-finite values of the loss, its gradient or "
                "a ratio are refused: check the datum's logprobs, weights and advantages. The model is unchanged"
            )

    def output(self) -> ForwardBackwardOutput | CriticOutput:
        """Returns the output of the Op's future."""
        found = {name: t.double() for name, t in self.datums.items() if name != "bad"}
        metrics = {name: float(_reduce(name, t, 0)) if len(t) else 0.0 for name, t in found.items()}
        metrics["tokens:sum"] = float(sum(self.tokens.lengths))
        if self.load is not None:
            metrics |= load_metrics(self.load)
        scores = Ragged(self.scores.numpy(), _score_layout(self.op).shapes)
        if self.critic:
            return CriticOutput(scores, metrics)
        return ForwardBackwardOutput(scores, metrics, self._elementwise_loss(scores))

    def _elementwise_loss(self, logprobs: Ragged) -> Ragged | None:
        """Returns the cross-entropy of each target, of which `loss:sum` is the sum; None for other losses."""
        if self.op.loss_fn != "cross_entropy":
            return None
        weights = self.op.batch.inputs.get("weights")
        losses = -logprobs.values if weights is None else -weights.values * logprobs.values
        return Ragged(losses, logprobs.shapes)


def fetch(jobs: Collection[Job]) -> None:
    """Moves the results of all jobs to the host, in one transfer."""
    parts = [
        part.flatten() for job in jobs for part in (job.scores, *job.datums.values(), job.load) if part is not None
    ]
    found = iter(torch.split(torch.cat(parts).cpu(), [len(part) for part in parts]))
    for job in jobs:
        job.scores = next(found)
        job.datums = {name: next(found) for name in job.datums}
        if job.load is not None:
            job.load = next(found).view(job.load.shape)


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


def _score_layout(op: ForwardBackward) -> Ragged:
    """Returns the ragged data of `Job.score_column`."""
    return op.batch.tokens if LOSSES[op.loss_fn].critic else op.batch.inputs["target_tokens"]


def _metrics(op: ForwardBackward, inputs: Mapping[str, Column]) -> Iterable[str]:
    """Returns the names of the loss's metrics, from a run of the loss on no datum."""
    blank = torch.zeros(0, 1, 1)
    entropy = blank if asks_entropy(op) else None
    return evaluate(op, blank, dict.fromkeys(inputs, blank), blank.bool(), entropy).metrics
