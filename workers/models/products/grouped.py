"""The products of all adapters of a pass on a linear as grouped products, however many tokens each of them has.

For GPUs, where each kernel is a launch: one by one, the adapters of 16 tenants are hundreds of kernels a layer. A CPU
computes them in batches of equal ones (workers/models/products/batched.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from math import prod
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]
"""A [rank, in] and B [out, rank], fp32."""
Pairs = Sequence[Pair | None]
"""The pair of each segment; None where it has no adapter on the linear."""

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
    """The pairs of linears that read the same input, in the base's dtype: `a` [segments, linears · rank, in], times the
    segments' scalings, and `b`, of each linear [segments, out, rank].

    The rank is the greatest, rounded up; zeros stand for what a segment lacks.
    """

    linears: Mapping[str, Pairs]
    a: Tensor
    b: Sequence[Tensor]

    @property
    def rank(self) -> int:
        return self.a.shape[1] // len(self.linears)

    def only(self, path: str) -> Stack:
        """Returns the part of one linear."""
        place = [*self.linears].index(path)
        a = torch.split(self.a, self.rank, 1)[place]
        return Stack({path: self.linears[path]}, a, [self.b[place]])

    def within(self, chosen: slice) -> Stack:
        """Returns the part of some segments."""
        linears = {path: pairs[chosen] for path, pairs in self.linears.items()}
        return Stack(linears, self.a[chosen], [one[chosen] for one in self.b])

    def pairs(self, a: Tensor, b: Sequence[Tensor]) -> Iterator[tuple[int, Pair, Pair]]:
        """Yields each pair with its segment, and its parts of tensors shaped as `self.a` and `self.b`."""
        widest = self.rank
        for pairs, *both in zip(self.linears.values(), torch.split(a, widest, 1), b, strict=True):
            for segment, (pair, of_a, of_b) in enumerate(zip(pairs, *both, strict=True)):
                if pair is not None:
                    rank = pair[0].shape[0]
                    yield segment, pair, (of_a, of_b) if rank == widest else (of_a[:rank], of_b[:, :rank])


class Gradients:
    """The gradients of a pass's stacks, for one backward pass. At its end they reach the adapters' `.grad`.

    So those of all linears reach an adapter in one walk. As results of the autograd functions each would be a node of
    autograd: 16 adapters of Qwen3-0.6B have 6,272.
    """

    def __init__(self, scalings: Sequence[float], *, at_once: bool = False) -> None:
        """`scalings`: one for each segment. `at_once`: do not wait for the end, where that would keep too many."""
        self._scalings, self._at_once = scalings, at_once
        self._found: list[tuple[Stack, Tensor, Sequence[Tensor]]] = []
        self.anchor = torch.empty(0, requires_grad=True)
        """An input of the autograd functions, so that autograd records them."""

    def add(self, stack: Stack, of_a: Tensor, of_b: Sequence[Tensor]) -> None:
        """Adds the gradients in a stack's `a`, without the scalings, and `b`. Called in a backward pass."""
        if not self._found and not self._at_once:
            torch.autograd.Variable._execution_engine.queue_callback(self._give)
        self._found.append((stack, of_a, of_b))
        if self._at_once:
            self._give()

    @torch.no_grad()
    def _give(self) -> None:
        found, self._found = self._found, []
        parameters: list[list[Tensor]] = [[] for _ in self._scalings]
        parts: list[list[Tensor]] = [[] for _ in self._scalings]
        for stack, of_a, of_b in found:
            for segment, pair, of_pair in stack.pairs(of_a, of_b):
                parameters[segment] += pair
                parts[segment] += of_pair
        for scaling, own, of_own in zip(self._scalings, parameters, parts, strict=True):
            if own:
                _accumulate(own, _exact(of_own, own, scaling))


def _exact(parts: list[Tensor], parameters: Sequence[Tensor], scaling: float) -> list[Tensor]:
    """Copies the gradients of an adapter's A, B, A, B, ... to contiguous fp32, and scales A's.

    AdamW's kernel refuses gradients that lie otherwise than their parameters. An adapter's gradients have memory of
    their own, so one that waits for its step does not keep the others'.
    """
    shapes = [parameter.shape for parameter in parameters]
    exact = _cut(parts[0].new_empty(sum(map(prod, shapes)), dtype=torch.float32), shapes)
    _copy_(exact, parts)
    torch._foreach_mul_(exact[::2], scaling)
    return exact


def _copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies A, B, A, B, ...: in a few kernels, and one for each B of lesser rank.

    A call copies one by one if one of its tensors lies otherwise than its source.
    """
    torch._foreach_copy_(targets[::2], sources[::2])
    pairs = [*zip(targets[1::2], sources[1::2], strict=True)]
    for dense in (True, False):
        chosen = [pair for pair in pairs if all(one.is_contiguous() for one in pair) == dense]
        if chosen:
            torch._foreach_copy_([target for target, _ in chosen], [source for _, source in chosen])


def _accumulate(parameters: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Adds the parts to the parameters' `.grad`, or gives them to those that have none. A parameter may come twice, and
    may be a part of another one."""
    held: dict[Tensor, Tensor] = {}
    computed: dict[Tensor, Tensor] = {}
    for parameter, part in zip(parameters, parts, strict=True):
        if not parameter.is_leaf:
            computed[parameter] = computed[parameter] + part if parameter in computed else part
        elif parameter.grad is None:
            parameter.grad = part
        elif parameter in held:
            parameter.grad.add_(part)
        else:
            held[parameter] = part
    if held:
        torch._foreach_add_([one.grad for one in held if one.grad is not None], [*held.values()])
    if computed:
        torch.autograd.backward([*computed], [*computed.values()])


@torch.no_grad()
def stacked(groups: Sequence[Mapping[str, Pairs]], scalings: Sequence[float], like: Tensor) -> dict[str, Stack]:
    """Copies the pairs of every linear into stacks of the dtype and on the device of `like`; returns them by linear.

    `groups`: the linears that read the same input.
    """
    if not groups:
        return {}
    shapes = [_shapes(group) for group in groups]
    every = [shape for of_group in shapes for shape in of_group]
    views = iter(_cut(like.new_zeros(sum(map(prod, every))), every))
    stacks = [Stack(group, next(views), [*islice(views, len(group))]) for group in groups]
    found = [each for stack in stacks for each in stack.pairs(stack.a, stack.b)]
    copies = [part for *_, parts in found for part in parts]
    _copy_(copies, [tensor for _, pair, _ in found for tensor in pair])
    torch._foreach_mul_(copies[::2], [scalings[segment] for segment, *_ in found])
    return {path: stack for stack in stacks for path in stack.linears}


def _cut(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Returns consecutive parts of `flat` in these shapes."""
    parts = torch.split(flat, [prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


def _shapes(group: Mapping[str, Pairs]) -> list[tuple[int, int, int]]:
    """The shape of a Stack's a, and those of its b."""
    real = {path: [pair for pair in pairs if pair is not None] for path, pairs in group.items()}
    rank = max(len(a) for pairs in real.values() for a, _ in pairs)
    rank += -rank % _ALIGNMENT
    firsts = [pairs[0] for pairs in real.values()]
    segments = len(next(iter(group.values())))
    return [(segments, len(group) * rank, firsts[0][0].shape[1]), *((segments, len(b), rank) for _, b in firsts)]


def added(x: Tensor, out: Tensor, stack: Stack, ends: Tensor | None, gradients: Gradients) -> Tensor:
    """Adds each segment's scaling · x Aᵀ Bᵀ, for x [T, in], to out [..., out features] in place, unless that is a view.

    `stack`: that of one linear. `ends`, int32 [segments] on the device: where the segments' rows end; None for one
    segment.
    """
    x = x.contiguous()  # columns in the place of rows would have to start at multiples of 16 bytes
    if torch.is_inference_mode_enabled():
        _add_(out.view(len(x), -1), _product(x, stack.a.mT, ends), stack.b[0], ends)
        return out
    own = out.clone() if out._is_view() else out  # autograd would copy the gradients of a view
    found: Tensor = _AddProducts.apply(x, own, stack, ends, gradients, gradients.anchor)  # type: ignore[no-untyped-call]
    return found


def joins(linear: nn.Module, x: Tensor, segments: int) -> TypeGuard[nn.Linear]:
    """True if `joined` computes the linear for x [T, in] of so many segments: it is frozen, no class of its own changes
    its product, and no hook must see its output or gather its weight."""
    if type(linear) is not nn.Linear or "forward" in vars(linear):
        return False
    if linear._forward_hooks or linear._forward_pre_hooks:
        return False
    return not linear.weight.requires_grad and suits(x, linear.weight.mT, segments)


def joined(
    x: Tensor, linears: Sequence[nn.Linear], stack: Stack, ends: Tensor | None, gradients: Gradients
) -> Sequence[Tensor]:
    """Computes for each linear of the stack x Wᵀ + bias and each segment's scaling · x Aᵀ Bᵀ: [T, out features], for
    x [T, in]. `ends`: see `added`.

    The large products add to the small ones in their own kernels, forward and backward. For 8,192 tokens of Qwen3-8B a
    kernel that adds takes 74 µs on an H100, and a layer had 7 more of them (14 with several segments). All A's are one
    product, and so are their gradients.
    """
    return _Joined.apply(x.contiguous(), linears, stack, ends, gradients, gradients.anchor)  # type: ignore[no-any-return,no-untyped-call]


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


def _keep(ctx: Any, x: Tensor, low: Tensor, stack: Stack, ends: Tensor | None, gradients: Gradients) -> None:
    """Keeps what `_gradients` needs: x [T, in], and low [T, linears · rank], its product with A."""
    ctx.stack, ctx.ends, ctx.gradients = stack, ends, gradients
    ctx.save_for_backward(x, low)


def _gradients(ctx: Any, of_outs: Sequence[Tensor]) -> Tensor:
    """Returns the gradient of `low` from those of the outputs [T, out]; notes those of the stack.

    Written by hand: those of all segments come from one product.
    """
    stack, ends = ctx.stack, ctx.ends
    x, low = ctx.saved_tensors
    parts = [_product(of_out, b, ends) for of_out, b in zip(of_outs, stack.b, strict=True)]
    of_low = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    lows = torch.split(low, stack.rank, 1)
    of_b = [_product(of_out.mT, one, ends) for of_out, one in zip(of_outs, lows, strict=True)]
    ctx.gradients.add(stack, _product(of_low.mT, x, ends), of_b)
    return of_low


class _AddProducts(torch.autograd.Function):
    """The autograd function behind `added`. `anchor`: see Gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, out: Tensor, stack: Stack, ends: Tensor | None, gradients: Gradients, anchor: Tensor
    ) -> Tensor:
        low = _product(x, stack.a.mT, ends)
        _add_(out.view(len(x), -1), low, stack.b[0], ends)
        _keep(ctx, x, low, stack, ends, gradients)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        rows = grads[0].reshape(-1, grads[0].shape[-1]).contiguous()
        of_low = _gradients(ctx, [rows])
        of_x = _product(of_low, ctx.stack.a, ctx.ends) if ctx.needs_input_grad[0] else None
        return of_x, grads[0], None, None, None, None


class _Joined(torch.autograd.Function):
    """The autograd function behind `joined`. `anchor`: see Gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        linears: Sequence[nn.Linear],
        stack: Stack,
        ends: Tensor | None,
        gradients: Gradients,
        anchor: Tensor,
    ) -> tuple[Tensor, ...]:
        low = _product(x, stack.a.mT, ends)
        _keep(ctx, x, low, stack, ends, gradients)
        ctx.weights = [linear.weight for linear in linears]
        lows = torch.split(low, stack.rank, 1)
        return tuple(_out(x, linear, one, b, ends) for linear, one, b in zip(linears, lows, stack.b, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        of_outs = [of_out.contiguous() for of_out in grads]
        of_low = _gradients(ctx, of_outs)
        of_x = None
        if ctx.needs_input_grad[0]:  # not below the first layer, where it would be large products for nothing
            of_x = _product(of_low, ctx.stack.a, ctx.ends)
            for of_out, weight in zip(of_outs, ctx.weights, strict=True):
                of_x.addmm_(of_out, weight)
        return of_x, None, None, None, None, None


def _out(x: Tensor, linear: nn.Linear, low: Tensor, b: Tensor, ends: Tensor | None) -> Tensor:
    if ends is None:
        return nn.functional.linear(low, b[0], linear.bias).addmm_(x, linear.weight.mT)
    out = _product(low, b.mT, ends).addmm_(x, linear.weight.mT)
    return out if linear.bias is None else out.add_(linear.bias)
