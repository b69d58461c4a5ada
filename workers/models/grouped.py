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
    """The pairs of one linear in the base's dtype: `a` [segments, rank, in], times the segments' scalings, and `b`
    [segments, out, rank]. The rank is the greatest, rounded up; zeros stand for what a segment lacks."""

    pairs: Pairs
    a: Tensor
    b: Tensor
    gradients: Gradients

    def parameters(self) -> list[Tensor]:
        """The pairs' tensors: A, B, A, B, ..."""
        return [tensor for pair in self.pairs if pair is not None for tensor in pair]

    def present(self, of_each: Sequence[float]) -> list[float]:
        """Returns those of one number for each segment whose segment has a pair."""
        return [one for one, pair in zip(of_each, self.pairs, strict=True) if pair is not None]

    def parts(self, a: Tensor, b: Tensor) -> list[Tensor]:
        """Cuts tensors shaped as `self.a` and `self.b` into parts shaped as `parameters`."""
        return [
            part
            for one_a, one_b, pair in zip(a, b, self.pairs, strict=True)
            if pair is not None
            for part in (one_a[: len(pair[0])], one_b[:, : len(pair[0])])
        ]


class Gradients:
    """The gradients of stacks that were made together, until the end of a backward pass.

    Then they reach all parameters in one walk. As results of the autograd functions each would be a node of autograd:
    16 adapters of Qwen3-0.6B have 6,272.
    """

    def __init__(self, scalings: Sequence[float]) -> None:
        """`scalings`: one for each segment."""
        self._scalings = scalings
        self._found: list[tuple[Stack, Tensor, Tensor]] = []
        self.anchor = torch.empty(0, requires_grad=True)
        """An input of the autograd functions, so that autograd records them."""

    def add(self, stack: Stack, of_a: Tensor, of_b: Tensor) -> None:
        """Adds the gradients in a stack's `a`, without the scalings, and `b`. Called in a backward pass."""
        if not self._found:
            torch.autograd.Variable._execution_engine.queue_callback(self._give)
        self._found.append((stack, of_a, of_b))

    @torch.no_grad()
    def _give(self) -> None:
        found, self._found = self._found, []
        products = [product for _, *both in found for product in both]
        shapes = [product.shape for product in products]
        exact = _cut(products[0].new_empty(sum(map(prod, shapes)), dtype=torch.float32), shapes)
        torch._foreach_copy_(exact, products)
        stacks = [stack for stack, _, _ in found]
        parts = [
            part for stack, *both in zip(stacks, exact[::2], exact[1::2], strict=True) for part in stack.parts(*both)
        ]
        torch._foreach_mul_(parts[::2], [scaling for stack in stacks for scaling in stack.present(self._scalings)])
        _accumulate([parameter for stack in stacks for parameter in stack.parameters()], parts)


def _accumulate(parameters: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Adds the parts to the parameters' `.grad`. A parameter may come twice, and may be a part of another one."""
    held: dict[Tensor, Tensor] = {}
    computed: list[tuple[Tensor, Tensor]] = []
    for parameter, part in zip(parameters, parts, strict=True):
        if not parameter.is_leaf:
            computed.append((parameter, part))
        elif parameter.grad is None:
            parameter.grad = part
        elif parameter in held:
            parameter.grad.add_(part)
        else:
            held[parameter] = part
    if held:
        torch._foreach_add_([one.grad for one in held if one.grad is not None], [*held.values()])
    if computed:
        torch.autograd.backward(*zip(*computed, strict=True))


@torch.no_grad()
def stacked(linears: Mapping[str, Pairs], scalings: Sequence[float], like: Tensor) -> dict[str, Stack]:
    """Copies the pairs of every linear into stacks of the dtype and on the device of `like`.

    All linears together take a few kernels; B's of unequal ranks take one each.
    """
    if not linears:
        return {}
    shapes = [shape for pairs in linears.values() for shape in _shapes(pairs)]
    views = iter(_cut(like.new_zeros(sum(map(prod, shapes))), shapes))
    gradients = Gradients(scalings)
    found = {path: Stack(pairs, next(views), next(views), gradients) for path, pairs in linears.items()}
    copies = [part for stack in found.values() for part in stack.parts(stack.a, stack.b)]
    masters = [tensor for stack in found.values() for tensor in stack.parameters()]
    of_each = [scaling for stack in found.values() for scaling in stack.present(scalings)]
    for kind in (slice(0, None, 2), slice(1, None, 2)):  # one unlike pair of strides makes a call copy one by one
        torch._foreach_copy_(copies[kind], masters[kind])
    torch._foreach_mul_(copies[::2], of_each)
    return found


def _cut(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Returns consecutive parts of `flat` in these shapes."""
    parts = torch.split(flat, [prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


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
    found: Tensor = _AddProducts.apply(x, own, stack, ends, stack.gradients.anchor)  # type: ignore[no-untyped-call]
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
    found: Tensor = _Joined.apply(x.contiguous(), linear, stack, ends, stack.gradients.anchor)  # type: ignore[no-untyped-call]
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


def _gradients(ctx: Any, gradient: Tensor) -> Tensor:
    """Returns the gradient of `low` from that of the output [T, out]; the stack gets its own.

    Written by hand: those of all segments come from one product.
    """
    x, low = ctx.saved_tensors
    low_gradient = _product(gradient, ctx.stack.b, ctx.ends)
    of_a, of_b = _product(low_gradient.mT, x, ctx.ends), _product(gradient.mT, low, ctx.ends)
    ctx.stack.gradients.add(ctx.stack, of_a, of_b)
    return low_gradient


class _AddProducts(torch.autograd.Function):
    """The autograd function behind `added`. `anchor`: see Gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, stack: Stack, ends: Tensor | None, anchor: Tensor) -> Tensor:
        low = _product(x, stack.a.mT, ends)
        _add_(out.view(len(x), -1), low, stack.b, ends)
        _keep(ctx, x, low, stack, ends)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        rows = grads[0].reshape(-1, grads[0].shape[-1]).contiguous()
        low_gradient = _gradients(ctx, rows)
        return _product(low_gradient, ctx.stack.a, ctx.ends), grads[0], None, None, None


class _Joined(torch.autograd.Function):
    """The autograd function behind `joined`. `anchor`: see Gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: nn.Linear, stack: Stack, ends: Tensor | None, anchor: Tensor) -> Tensor:
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
        low_gradient = _gradients(ctx, gradient)
        of_x = None
        if ctx.needs_input_grad[0]:  # not below the first layer, where it would be a large product for nothing
            of_x = _product(low_gradient, ctx.stack.a, ctx.ends).addmm_(gradient, ctx.weight)
        return of_x, None, None, None, None
