"""The products of a pass's adapters on one linear in batches: neighbours of equally many tokens, one rank and one
scaling share a product.

For CPUs, and for GPUs without kernels for grouped products (workers/models/products/grouped.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """`rows` of x. Each of `pairs`, fp32 A [rank, in] and B [out, rank], gets equally many of them. Without pairs the
    rows have no adapter."""

    rows: slice
    pairs: Sequence[tuple[Tensor, Tensor]]
    scaling: float


def added(x: Tensor, out: Tensor, runs: Sequence[Run]) -> Tensor:
    """Adds each pair's scaling · x Aᵀ Bᵀ, for x [T, in], to out [..., out features] in place, unless that is a view."""
    tensors = [tensor for run in runs for pair in run.pairs for tensor in pair]
    if not tensors:
        return out
    if torch.is_inference_mode_enabled():
        return _add_in_place(x, out.reshape(len(x), -1), runs).view(out.shape)
    own = out.clone() if out._is_view() else out  # autograd would copy the gradients of a view
    return _AddProducts.apply(x, own, runs, *tensors)  # type: ignore[no-any-return,no-untyped-call]


class _AddProducts(torch.autograd.Function):
    """Adds scaling · x Aᵀ Bᵀ to the base's output, in place, run by run of the rows.

    The backward pass is written by hand: with autograd every adapter would add a handful of nodes and copies in each of
    hundreds of linears. The products are batched: eight adapters of 64 tokens one after another take twice as long.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, runs: Sequence[Run], *tensors: Tensor) -> Tensor:
        """x [rows, in], out [..., out features]. `tensors` are the runs' A, B, A, B, ..., which autograd must see."""
        rows = out.view(len(x), -1)
        saved = []
        for run in runs:
            if run.pairs:
                low, a, b = _lowered(x, run)
                _split(rows, run).baddbmm_(low, b.mT)
                saved += [low, a, b]
        ctx.runs = runs
        ctx.save_for_backward(x, *saved)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *saved = ctx.saved_tensors
        gradient = grads[0].reshape(len(x), -1)
        x_gradient = torch.empty_like(x)
        found: list[Tensor] = []
        left = iter(saved)
        for run in ctx.runs:
            if not run.pairs:
                x_gradient[run.rows] = 0
                continue
            low, a, b = islice(left, 3)
            share = _split(gradient, run)
            low_gradient = torch.bmm(share, b).mul_(run.scaling)
            torch.bmm(low_gradient, a, out=_split(x_gradient, run))
            of_a, of_b = torch.bmm(low_gradient.mT, _split(x, run)), torch.bmm(share.mT, low)
            found += [tensor for pair in zip(of_a.float(), of_b.float(), strict=True) for tensor in pair]
        return x_gradient, grads[0], None, *found


def _add_in_place(x: Tensor, out: Tensor, runs: Sequence[Run]) -> Tensor:
    """Adds the products without gradients, and without a copy of the output or of a single adapter's weights.

    Weights of several adapters are copied into one product. On two cores, four adapters of rank 32 over 64 rows of
    SmolLM2-135M take 0.1 ms a linear this way, and 0.2 ms one by one, since each small product has a fixed cost.
    """
    for run in runs:
        if len(run.pairs) == 1:
            a, b = (weights.to(x.dtype).t() for weights in run.pairs[0])
            out[run.rows].addmm_(x[run.rows] @ a, b, alpha=run.scaling)
        elif run.pairs:
            low, _, b = _lowered(x, run)
            _split(out, run).baddbmm_(low, b.mT)
    return out


def _lowered(x: Tensor, run: Run) -> tuple[Tensor, Tensor, Tensor]:
    """Computes scaling · x Aᵀ [pairs, rows of each, rank] of a run with pairs. Also returns their A [pairs, rank, in]
    and B [pairs, out, rank]; all are in x's dtype."""
    a, b = (_stacked(weights).to(x.dtype) for weights in zip(*run.pairs, strict=True))
    return torch.bmm(_split(x, run), a.mT).mul_(run.scaling), a, b


def _stacked(weights: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(weights)) if len(weights) > 1 else weights[0][None]


def _split(tensor: Tensor, run: Run) -> Tensor:
    """The run's rows of `tensor`, [pairs, rows of each, features]."""
    return tensor[run.rows].view(len(run.pairs), -1, tensor.shape[1])
