"""Target logprobs from hidden states, and their backward pass, without the full [tokens, vocabulary] logits.

For the backward pass a chunk keeps the exponentials of its logits, in the base's dtype. They lie in the logits' own
memory, unless a GPU makes them in one compiled kernel. The gradient of the logits is these exponentials times a factor
for each row, except at the targets: so the backward pass needs only matrix products. Everything is computed by hand,
without autograd, because the loss that gives the upstream gradient is known only between the two passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from workers.backends.devices import moved
from workers.backends.training.architectures import LogitRule
from workers.models.adapter import Adapter, Segments

# A wider vocabulary has fewer rows in a chunk, so that a chunk's logits do not grow with it: 128 MB in fp32 on a CPU.
_WIDE = 2**17


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """`rows` of logits are made at once, of a vocabulary of up to 131,072. `work`: fp32 elements worked on at once.
    `kept`: elements of the logits that are kept until the loss is known; more are made twice."""

    rows: int
    work: int
    kept: int

    @classmethod
    def of_gpu(cls, memory: int) -> ChunkSizes:
        """Returns the sizes for a GPU of so many bytes. It wants few large kernels. In bf16 a chunk takes 1/64 of its
        memory, the work 1/64, and what is kept 1/16: on an H200 8,900 rows, and 30,900 rows of 151,936 tokens."""
        return cls(rows=max(256, memory >> 24), work=memory >> 8, kept=memory >> 5)

    def rows_of(self, width: int) -> int:
        """Returns the rows of a chunk of logits this wide."""
        return max(1, self.rows * _WIDE // max(_WIDE, width))

    def bytes(self, logits: int, itemsize: int) -> int:
        """Returns the most that the head takes at once, for so many logits of `itemsize` bytes: what is kept, the rows
        of a chunk that have a gradient, and the work."""
        chunk = self.rows * _WIDE
        return (min(logits, self.kept) + min(logits, chunk)) * itemsize + min(logits, self.work) * 4


@cache
def chunk_sizes(device: torch.device) -> ChunkSizes:
    """Returns the sizes for a device.

    On a CPU more rows gain nothing, and fewer rows read the head's weight too often; `work` is 1 MB, which should stay
    in a core's cache, and `kept` 128 MB in bf16.
    """
    if device.type == "cpu":
        return ChunkSizes(rows=256, work=2**18, kept=2**26)
    return ChunkSizes.of_gpu(torch.get_device_module(device).get_device_properties(device).total_memory)


@dataclass(slots=True, eq=False)
class WeightGradient:
    """The gradient of the head's own weight, where it is trained: fp32 [V, hidden]; None for zero."""

    found: Tensor | None = None

    def add(self, product: Tensor) -> None:
        self.found = product.float() if self.found is None else self.found.add_(product)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One adapter's share in a chunk: `rows` of the chunk, their product with A, and A and B in the base's dtype."""

    adapter: Adapter
    rows: slice
    low: Tensor
    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """The logprobs, fp32 [T, K], of a chunk of T rows with K targets each.

    With y the logits, top the row's greatest y, and slope the derivative of y by the head's output without the rule's
    scale: `exps` [T, V] is exp(y - top) · slope, and `total` fp32 [T, 1] the sum of exp(y - top); `slopes` fp32 [T, K]
    are those at the targets. `entropy`: fp32 [T, 1] in nats, of the full distribution, if it was asked for.
    """

    hidden: Tensor
    targets: Tensor
    logprobs: Tensor
    exps: Tensor
    total: Tensor
    slopes: Tensor
    parts: Sequence[Part]
    entropy: Tensor | None = None

    def only(self, chosen: Tensor) -> Scored:
        """Returns the rows that bool [T] `chosen`, on the CPU, marks."""
        ends = [0, *chosen.cumsum(0).tolist()]
        chosen = moved(chosen.nonzero()[:, 0], self.hidden.device)
        parts = []
        for part in self.parts:
            rows = slice(ends[part.rows.start], ends[part.rows.stop])
            parts.append(replace(part, rows=rows, low=part.low[chosen[rows] - part.rows.start]))
        return Scored(
            self.hidden[chosen],
            self.targets[chosen],
            self.logprobs[chosen],
            self.exps[chosen],
            self.total[chosen],
            self.slopes[chosen],
            parts,
        )


@dataclass(frozen=True, slots=True, eq=False)
class LmHead:
    """logits = rule(h Wᵀ + adapters). `weight` is [V, hidden]; None where "hidden" states already are logits.

    `path` is the head's module path, the key of an adapter's pair. `gradient` collects the weight's own gradient, if
    the weight is trained. `fused`: exponentials are computed in one compiled kernel, on a GPU.
    """

    weight: Tensor | None
    path: str
    rule: LogitRule
    gradient: WeightGradient | None = None
    fused: bool = False

    def score(self, hidden: Tensor, targets: Tensor, segments: Segments, *, entropy: bool = False) -> Scored:
        """Computes the logprobs of targets, int64 [T, K], from hidden [T, hidden size]; the segments add up to T."""
        products, parts = self._products(hidden, segments)
        picked, picked_slopes = self._logits_(products.gather(-1, targets).float())
        slopes = torch.ones_like(picked) if picked_slopes is None else picked_slopes
        entropies = torch.empty(len(hidden), 1, dtype=torch.float32, device=hidden.device) if entropy else None
        if self.fused and entropies is None and self.rule.scale == 1 and self.rule.cap is None:
            exps, total, log_z = _compiled()(products)
        else:
            exps, (total, log_z) = products, self._exponentials_(products, entropies)
        return Scored(hidden, targets, picked - log_z, exps, total, slopes, parts, entropies)

    def _exponentials_(self, products: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor]:
        """Turns products into `exps`, and fills in the entropies; returns fp32 [T, 1] the rows' sums and
        log Z = log of the sum + top."""
        total = torch.empty(len(products), 1, dtype=torch.float32, device=products.device)
        log_z = torch.empty_like(total)
        for rows in _slices(len(products), chunk_sizes(products.device).work // products.shape[1]):
            y, slopes = self._logits_(products[rows].float())
            top = y.amax(-1, keepdim=True)
            y.sub_(top)
            below = y.clone() if entropies is not None else y
            torch.sum(y.exp_(), -1, keepdim=True, out=total[rows])
            if entropies is not None:
                entropies[rows] = _entropy(below, y, total[rows])
            torch.add(total[rows].log(), top, out=log_z[rows])
            products[rows] = y if slopes is None else y.mul_(slopes)
        return total, log_z

    def backward(self, scored: Scored, gradient: Tensor) -> Tensor:
        """Returns the gradient in `scored.hidden`, of its dtype, from the gradient in the logprobs (fp32 [T, K]).

        Uses up `scored`. Adds the gradients of the adapters' pairs to their `.grad`, and the weight's to
        `self.gradient`.
        """
        factor = self._seed_(scored, gradient)
        if self.weight is None:
            return scored.exps.mul_(factor)
        if self.gradient is not None:
            self.gradient.add(scored.exps.t() @ (scored.hidden.float() * factor).to(scored.hidden.dtype))
        found = (scored.exps @ self.weight).float().mul_(factor)
        for part in scored.parts:
            found[part.rows].add_(self._back_through(part, scored, factor[part.rows]))
        return found.to(scored.hidden.dtype)

    def _products(self, hidden: Tensor, segments: Segments) -> tuple[Tensor, list[Part]]:
        if self.weight is None:
            return hidden.clone(), []  # the backward pass of the operation that made them may need them
        products = hidden @ self.weight.t()
        parts = list(self._parts(hidden, segments))
        for part in parts:
            products[part.rows].addmm_(part.low, part.b.t())
        if self.rule.vocabulary is not None:
            products[:, self.rule.vocabulary :] = float("-inf")
        return products, parts

    def _parts(self, hidden: Tensor, segments: Segments) -> Iterator[Part]:
        start = 0
        for adapter, count in segments:
            rows = slice(start, start + count)
            start += count
            pair = None if adapter is None else adapter.pairs.get(self.path)
            if adapter is not None and pair is not None:
                a, b = pair.a.to(hidden.dtype), pair.b.to(hidden.dtype)
                yield Part(adapter, rows, (hidden[rows] @ a.t()) * adapter.scaling, a, b)

    def _logits_(self, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """Computes y, and dy/dz up to the rule's scale (None for 1), from fp32 z, in the memory of z."""
        if self.rule.scale != 1:
            z.mul_(self.rule.scale)
        if self.rule.cap is None:
            return z, None
        bent = z.div_(self.rule.cap).tanh_()
        slopes = 1 - bent.square()
        return bent.mul_(self.rule.cap), slopes

    def _seed_(self, scored: Scored, gradient: Tensor) -> Tensor:
        """Turns `exps` into the gradient in z, except for a factor a row, fp32 [T, 1], which is returned.

        d loss / d y_v = sum over k of g_k (1[v = target_k] - p_v). The targets' elements come from fp32: in bf16 the
        difference of two numbers near 1 would be lost. With one target a row, no other element needs a change.
        """
        if gradient.shape[1] == 1:
            every = torch.arange(len(gradient), device=gradient.device)[:, None]
            at_targets = torch.expm1(scored.logprobs) * scored.total * scored.slopes
            # scatter_ takes 15 times as long as this on a CPU.
            scored.exps[every, scored.targets] = at_targets.to(scored.exps.dtype)
            return (gradient / scored.total).mul_(-self.rule.scale)
        share = gradient.sum(-1, keepdim=True).div_(scored.total)
        at_targets = gradient * scored.slopes
        for rows in _slices(len(gradient), chunk_sizes(gradient.device).work // scored.exps.shape[1]):
            slope_sums = scored.exps[rows].float().mul_(-share[rows])
            scored.exps[rows] = slope_sums.scatter_add_(-1, scored.targets[rows], at_targets[rows]).to(
                scored.exps.dtype
            )
        return torch.full_like(share, self.rule.scale)

    def _back_through(self, part: Part, scored: Scored, factor: Tensor) -> Tensor:
        """Returns a pair's share of the gradient in the hidden states; its own gradient goes to `.grad`.

        Products with `factor`, which is fp32, are fp32."""
        pair = part.adapter.pairs[self.path]
        exps, hidden = scored.exps[part.rows], scored.hidden[part.rows]
        low_gradient = ((exps @ part.b) * (factor * part.adapter.scaling)).to(hidden.dtype)
        _add_grad(pair.a, low_gradient.t() @ hidden)
        _add_grad(pair.b, exps.t() @ (part.low * factor).to(hidden.dtype))
        return low_gradient @ part.a


def _exponentials(products: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `exps` of logits [T, V], and fp32 [T, 1] their sums and log Z, without caps and entropies."""
    y = products.float()
    top = y.amax(-1, keepdim=True)
    exps = (y - top).exp()
    total = exps.sum(-1, keepdim=True)
    return exps.to(products.dtype), total, total.log() + top


@cache
def _compiled() -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """`_exponentials` in two passes over the logits instead of six: on an H100 3 ms of 8,192 rows of 151,936 instead of
    17. Compiling takes some seconds, in this process alone."""
    return torch.compile(_exponentials, dynamic=True, options={"compile_threads": 1})


def _entropy(below: Tensor, exps: Tensor, total: Tensor) -> Tensor:
    """Returns log total - sum over v of p_v (y_v - top), fp32 [T, 1], from `below` = y - top [T, V], its exponentials,
    and the rows' sums of these, `total` [T, 1]."""
    # the -inf of padding rows would give 0 · -inf, which is not a number
    mean = (exps * below.clamp_min_(torch.finfo(below.dtype).min)).sum(-1, keepdim=True) / total
    return total.log() - mean


def _add_grad(parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient.float() if parameter.grad is None else parameter.grad.add_(gradient)


def _slices(count: int, step: int) -> Iterator[slice]:
    step = max(1, step)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
