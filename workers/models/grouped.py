"""The products of all adapters of a pass on one linear as two grouped products, however many tokens each of them has.

For GPUs, where each kernel is a launch: one by one, the adapters of 16 tenants are hundreds of kernels a layer. A CPU
computes them in runs of equal ones (workers/models/lora.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

Pairs = Sequence[tuple[Tensor, Tensor] | None]
"""A [rank, in] and B [out, rank], fp32, of each segment; None where it has no adapter on the linear."""

# Rows of grouped products are multiples of 16 bytes: 8 numbers of bf16.
_ALIGNMENT = 8
MOST_GROUPS = 1023
"""The most groups of one product: torch's kernels refuse more."""


def suits(x: Tensor, out: Tensor, segments: int) -> bool:
    """True if torch has kernels for the grouped products between x [T, in] and out [T, out] of so many segments."""
    aligned = x.shape[1] % _ALIGNMENT == out.shape[1] % _ALIGNMENT == 0
    return aligned and segments <= MOST_GROUPS and has_kernels(x.device, x.dtype)


@cache
def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """True on GPUs of compute capability 9 and 10, in bf16. Elsewhere torch computes group after group, and the host
    waits for their ends at each product."""
    if device.type == "cpu" or dtype is not torch.bfloat16:
        return False
    return torch.get_device_module(device).get_device_capability(device)[0] in (9, 10)


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """The pairs of one linear: `a` [segments, rank, in], times `scalings` fp32 [segments, 1, 1], and `b` [segments,
    out, rank], in the base's dtype. The rank is the greatest, rounded up; zeros stand for what a segment lacks."""

    pairs: Pairs
    a: Tensor
    b: Tensor
    scalings: Tensor

    def parameters(self) -> list[Tensor]:
        """The pairs' tensors: A, B, A, B, ..."""
        return [tensor for pair in self.pairs if pair is not None for tensor in pair]

    def parts(self, a: Tensor, b: Tensor) -> list[Tensor]:
        """Cuts tensors shaped as `self.a` and `self.b` into parts shaped as `parameters`."""
        return [
            part
            for one_a, one_b, pair in zip(a, b, self.pairs, strict=True)
            if pair is not None
            for part in (one_a[: len(pair[0])], one_b[:, : len(pair[0])])
        ]


@torch.no_grad()
def stacked(linears: Mapping[str, Pairs], scalings: Sequence[float], like: Tensor) -> dict[str, Stack]:
    """Copies the pairs of every linear into stacks of the dtype and on the device of `like`.

    All linears together take a few kernels; B's of unequal ranks take one each.
    """
    if not linears:
        return {}
    shapes = [shape for pairs in linears.values() for shape in _shapes(pairs)]
    sizes = [prod(shape) for shape in shapes]
    parts = torch.split(like.new_zeros(sum(sizes)), sizes)
    views = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
    factors = torch.tensor(scalings).to(like.device, non_blocking=True)[:, None, None]
    found = {path: Stack(pairs, next(views), next(views), factors) for path, pairs in linears.items()}
    copies = [part for stack in found.values() for part in stack.parts(stack.a, stack.b)]
    masters = [tensor for stack in found.values() for tensor in stack.parameters()]
    of_each = [
        scaling for pairs in linears.values() for pair, scaling in zip(pairs, scalings, strict=True) if pair is not None
    ]
    for kind in (slice(0, None, 2), slice(1, None, 2)):  # one unlike pair of strides makes a call copy one by one
        torch._foreach_copy_(copies[kind], masters[kind])
    torch._foreach_mul_(copies[::2], of_each)
    return found


def _shapes(pairs: Pairs) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The shapes of a Stack's a and b."""
    real = [pair for pair in pairs if pair is not None]
    rank = max(len(a) for a, _ in real)
    rank += -rank % _ALIGNMENT
    a, b = real[0]
    return (len(pairs), rank, a.shape[1]), (len(pairs), len(b), rank)


def added(x: Tensor, out: Tensor, stack: Stack, ends: Tensor | None) -> Tensor:
    """Adds each segment's scaling · x Aᵀ Bᵀ, for x [T, in], to out [..., out features] in place, unless that is a view.

    `ends`, int32 [segments] on the device: where the segments' rows end; None for one segment.
    """
    x = x.contiguous()  # columns in the place of rows would have to start at multiples of 16 bytes
    if torch.is_inference_mode_enabled():
        _add_(out.view(len(x), -1), _product(x, stack.a.mT, ends), stack.b, ends)
        return out
    own = out.clone() if out._is_view() else out  # autograd would copy the gradients of a view
    found: Tensor = _AddProducts.apply(x, own, stack, ends, *stack.parameters())  # type: ignore[no-untyped-call]
    return found


def joins(linear: nn.Module, x: Tensor, segments: int) -> TypeGuard[nn.Linear]:
    """True if `joined` computes the linear for x [T, in] of so many segments: it is frozen, no class of its own changes
    its product, and no hook must see its output or gather its weight."""
    if type(linear) is not nn.Linear or "forward" in vars(linear):
        return False
    if linear._forward_hooks or linear._forward_pre_hooks:
        return False
    return not linear.weight.requires_grad and suits(x, linear.weight.mT, segments)


def joined(x: Tensor, linear: nn.Linear, stack: Stack, ends: Tensor | None) -> Tensor:
    """Computes x Wᵀ + bias and each segment's scaling · x Aᵀ Bᵀ: [T, out features], for x [T, in]. `ends`: see `added`.

    The large products add to the small ones in their own kernels, forward and backward. For 8,192 tokens of Qwen3-8B a
    kernel that adds takes 74 µs on an H100, and a layer had 7 more of them (14 with several segments).
    """
    found: Tensor = _Joined.apply(x.contiguous(), linear, stack, ends, *stack.parameters())  # type: ignore[no-untyped-call]
    return found


def _add_(rows: Tensor, low: Tensor, b: Tensor, ends: Tensor | None) -> None:
    """Adds low [T, rank] · Bᵀ to rows [T, out]: for one segment within the product's own kernel."""
    if ends is None:
        rows.addmm_(low, b[0].mT)
    else:
        rows.add_(_product(low, b.mT, ends))


def _product(left: Tensor, right: Tensor, ends: Tensor | None) -> Tensor:
    """Multiplies each segment's rows [T, n] by its own [n, m] of [segments, n, m]; or its columns [n, T] by its rows
    [T, m], which gives [segments, n, m]."""
    if ends is not None:
        return nn.functional.grouped_mm(left, right, offs=ends)
    return left @ right[0] if right.dim() == 3 else (left @ right)[None]


def _keep(ctx: Any, x: Tensor, low: Tensor, stack: Stack, ends: Tensor | None) -> None:
    """Keeps what `_gradients` needs: x [T, in], and low [T, rank], its product with A."""
    ctx.stack, ctx.ends = stack, ends
    ctx.save_for_backward(x, low)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns the gradients of `low` and of the stack's parameters, from that of the output [T, out].

    Written by hand: those of all segments come from one product, and each parameter's is a part of that.
    """
    x, low = ctx.saved_tensors
    low_gradient = _product(gradient, ctx.stack.b, ctx.ends)
    of_a = _product(low_gradient.mT, x, ctx.ends) * ctx.stack.scalings
    of_b = _product(gradient.mT, low, ctx.ends).float()
    return low_gradient, ctx.stack.parts(of_a, of_b)


class _AddProducts(torch.autograd.Function):
    """The autograd function behind `added`. `parameters` are the stack's, passed so that autograd sees them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, stack: Stack, ends: Tensor | None, *parameters: Tensor) -> Tensor:
        low = _product(x, stack.a.mT, ends)
        _add_(out.view(len(x), -1), low, stack.b, ends)
        _keep(ctx, x, low, stack, ends)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        rows = grads[0].reshape(-1, grads[0].shape[-1]).contiguous()
        low_gradient, of_parameters = _gradients(ctx, rows)
        return _product(low_gradient, ctx.stack.a, ctx.ends), grads[0], None, None, *of_parameters


class _Joined(torch.autograd.Function):
    """The autograd function behind `joined`. `parameters` are the stack's, passed so that autograd sees them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, linear: nn.Linear, stack: Stack, ends: Tensor | None, *parameters: Tensor
    ) -> Tensor:
        low = _product(x, stack.a.mT, ends)
        _keep(ctx, x, low, stack, ends)
        ctx.weight = linear.weight
        if ends is None:
            return nn.functional.linear(low, stack.b[0], linear.bias).addmm_(x, linear.weight.mT)
        out = _product(low, stack.b.mT, ends).addmm_(x, linear.weight.mT)
        return out if linear.bias is None else out.add_(linear.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gradient = grads[0].contiguous()
        low_gradient, of_parameters = _gradients(ctx, gradient)
        of_x = None
        if ctx.needs_input_grad[0]:  # not below the first layer, where it would be a large product for nothing
            of_x = _product(low_gradient, ctx.stack.a, ctx.ends).addmm_(gradient, ctx.weight)
        return of_x, None, None, None, *of_parameters
