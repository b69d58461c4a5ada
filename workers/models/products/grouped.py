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


def is_aligned(size: int) -> bool:
    """True if grouped products take rows of this size. An adapter of such a rank needs no padding."""
    return size % _ALIGNMENT == 0


def aligned(size: int) -> int:
    """Returns the least size of a row that is not smaller and that grouped products take."""
    return size + -size % _ALIGNMENT


def suits(x: Tensor, out: Tensor, segments: int) -> bool:
    """True if torch has kernels for the grouped products between x [T, in] and out [T, out] of `segments` segments."""
    fits = is_aligned(x.shape[1]) and is_aligned(out.shape[1]) and segments <= MOST_GROUPS
    return fits and has_kernels(x.device, x.dtype)


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

    All stacks of a pass are parts of one tensor, which has a row for each segment. The rank is the greatest, rounded
    up; zeros stand for what a segment lacks.
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

    def lying_in(self, rows: Tensor) -> Stack:
        """Returns the stack that lies in `rows` as this one lies in the rows of its pass."""
        return Stack(self.linears, _lying(self.a, rows), [_lying(one, rows) for one in self.b])

    def pairs(self, segment: int) -> Iterator[tuple[Pair, Pair]]:
        """Yields each pair of a segment with its parts of `a` and `b`."""
        for pairs, a, b in zip(self.linears.values(), torch.split(self.a[segment], self.rank), self.b, strict=True):
            if (pair := pairs[segment]) is not None:
                rank = pair[0].shape[0]
                yield pair, (a[:rank], b[segment, :, :rank])


def _lying(view: Tensor, rows: Tensor) -> Tensor:
    return rows.as_strided(view.size(), view.stride(), view.storage_offset())


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The adapter of a segment: its scaling, and its tensor that lies as a row of the stacks, if it has one."""

    scaling: float
    row: nn.Parameter | None


class Gradients:
    """The gradients of a pass's stacks, for one backward pass. At its end they reach the adapters' `.grad`.

    So those of all linears reach an adapter at once. As results of the autograd functions each would be a node of
    autograd: 16 adapters of Qwen3-0.6B have 6,272.
    """

    def __init__(self, stacks: Sequence[Stack], segments: Sequence[Segment], width: int, of_a: int) -> None:
        """`width`: that of a row of the stacks, which begins with `of_a` elements of the A's."""
        self._stacks, self._segments, self._width, self._of_a = stacks, segments, width, of_a
        self._rows: Tensor | None = None
        self.anchor = torch.empty(0, requires_grad=True)
        """An input of the autograd functions, so that autograd records them."""

    def add(self, stack: Stack, of_a: Tensor, of_b: Sequence[Tensor]) -> None:
        """Adds the gradients in a stack's `a`, without the scalings, and `b`. Called in a backward pass."""
        if self._rows is None:
            self._rows = of_a.new_zeros(len(self._segments), self._width, dtype=torch.float32)
            torch.autograd.Variable._execution_engine.queue_callback(self._give)
        found = stack.lying_in(self._rows)
        for total, part in zip([found.a, *found.b], [of_a, *of_b], strict=True):
            total.add_(part)

    @torch.no_grad()
    def _give(self) -> None:
        """An adapter's gradients get memory of their own, so one that waits for its step does not keep the others'."""
        rows, self._rows = self._rows, None
        assert rows is not None
        only_rows = all(segment.row is not None for segment in self._segments)
        stacks = [] if only_rows else [stack.lying_in(rows) for stack in self._stacks]
        for number, (segment, found) in enumerate(zip(self._segments, rows, strict=True)):
            found[: self._of_a].mul_(segment.scaling)
            if segment.row is not None:
                _accumulate([segment.row], [found])
            else:
                pairs = [both for stack in stacks for both in stack.pairs(number)]
                _accumulate([one for pair, _ in pairs for one in pair], [one for _, parts in pairs for one in parts])


def _accumulate(parameters: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Adds the parts to the parameters' `.grad`, and gives copies to those that have none. A parameter may be a part of
    another one."""
    pairs = [*zip(parameters, parts, strict=True)]
    held = [(parameter.grad, part) for parameter, part in pairs if parameter.is_leaf and parameter.grad is not None]
    if held:
        torch._foreach_add_([grad for grad, _ in held], [part for _, part in held])
    others = [(parameter, part) for parameter, part in pairs if not parameter.is_leaf or parameter.grad is None]
    copies = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for _, part in others]
    _copy_(copies, [part for _, part in others])
    computed: list[tuple[Tensor, Tensor]] = []
    for (parameter, _), copy in zip(others, copies, strict=True):
        if parameter.is_leaf:
            parameter.grad = copy
        else:
            computed.append((parameter, copy))
    if computed:
        torch.autograd.backward([parameter for parameter, _ in computed], [part for _, part in computed])


@torch.no_grad()
def stacked(
    groups: Sequence[Mapping[str, Pairs]], segments: Sequence[Segment], like: Tensor
) -> tuple[dict[str, Stack], Gradients]:
    """Copies the pairs of every linear into stacks of the dtype and on the device of `like`; returns them by linear.

    `groups`: the linears that read the same input. A row has the A's of all groups, and then the B's. So an adapter
    whose tensors lie in the same way is one copy.
    """
    if not groups:
        return {}, Gradients([], segments, 0, 0)
    shapes = [_shapes(group) for group in groups]
    of_a, of_b = [a for a, _ in shapes], [b for _, bs in shapes for b in bs]
    sizes = [prod(shape) for shape in (*of_a, *of_b)]
    rows = like.new_zeros(len(segments), sum(sizes))
    parts = zip(torch.split(rows, sizes, 1), (*of_a, *of_b), strict=True)
    views = iter([part.view(len(segments), *shape) for part, shape in parts])
    every_a = [*islice(views, len(groups))]
    stacks = [Stack(group, a, [*islice(views, len(group))]) for group, a in zip(groups, every_a, strict=True)]
    width_of_a = sum(map(prod, of_a))
    whole = [(target, one.row) for target, one in zip(rows, segments, strict=True) if one.row is not None]
    _copy_([target for target, _ in whole], [row for _, row in whole])
    for number, one in enumerate(segments):
        if one.row is None:
            found = [both for stack in stacks for both in stack.pairs(number)]
            _copy_([part for _, parts in found for part in parts], [tensor for pair, _ in found for tensor in pair])
    torch._foreach_mul_([row[:width_of_a] for row in rows], [one.scaling for one in segments])
    by_path = {path: stack for stack in stacks for path in stack.linears}
    return by_path, Gradients(stacks, segments, rows.shape[1], width_of_a)


def _copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies in a few kernels, and one for each target that lies otherwise than its source.

    A call copies one by one if one of its tensors does.
    """
    pairs = [*zip(targets, sources, strict=True)]
    for dense in (True, False):
        chosen = [pair for pair in pairs if all(one.is_contiguous() for one in pair) == dense]
        if chosen:
            torch._foreach_copy_([target for target, _ in chosen], [source for _, source in chosen])


def _shapes(group: Mapping[str, Pairs]) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """The shape of a segment's part of a Stack's a, and those of its b."""
    real = {path: [pair for pair in pairs if pair is not None] for path, pairs in group.items()}
    rank = aligned(max(len(a) for pairs in real.values() for a, _ in pairs))
    firsts = [pairs[0] for pairs in real.values()]
    return (len(group) * rank, firsts[0][0].shape[1]), [(len(b), rank) for _, b in firsts]


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
