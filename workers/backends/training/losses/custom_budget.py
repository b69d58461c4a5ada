"""Resource budget of one datum of a custom loss, checked before every torch operation: none too large ever starts.

It counts work instead of time, since a replay must end as the live run did, on however busy a machine. For the same
reason the limits may grow, but not shrink.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

MAX_ELEMENTS = 2**27
"""Most elements of all results of one datum, including views and the backward pass: at most 1 GiB at 8 bytes each."""
MAX_WORK = 2**34
"""Most work of one Op, shared equally among its datums: about ten seconds of a core. The unit is one streamed element,
about 1 ns."""
CALL_WORK = 2**15
"""Work of every torch operation in addition to its elements: about 30 microseconds."""

_ATEN = torch.ops.aten

# Their results have no more elements than their tensors have together, so their results need not be computed ahead.
_NO_LARGER_NAMES = """
    _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data _to_copy alias all amax amin any argmax
    argmin cat clone copy count_nonzero cummax cummin cumprod cumsum detach flip gather index_put log_sigmoid_backward
    log_sigmoid_forward logcumsumexp logsumexp max mean min ones_like prod scatter scatter_add sort std sum topk tril
    triu var zeros_like
"""
_NO_LARGER = frozenset(getattr(_ATEN, name) for name in _NO_LARGER_NAMES.split())
_PRODUCTS = frozenset({_ATEN.mm, _ATEN.bmm, _ATEN.addmm, _ATEN.baddbmm})

# Cost of an element, in streamed elements. Operations that look elements up, or work in short rows, took up to 40 ns
# an element; sorting 4 million took up to 150 ns an element.
_SORTED, _LOOKED_UP = 64, 16
_SORTS = frozenset({_ATEN.sort, _ATEN.topk, _ATEN.median, _ATEN.nanmedian})
_STREAMED_NAMES = """
    _to_copy alias amax amin arange cat clone copy cumprod cumsum detach flip full log_sigmoid_backward
    log_sigmoid_forward max mean min ones ones_like prod sum zeros zeros_like
"""
_STREAMED = frozenset(getattr(_ATEN, name) for name in _STREAMED_NAMES.split()) | _PRODUCTS


class LimitReached(Exception):
    """The loss would exceed the budget of a datum."""


class Budget(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every torch operation of one datum before it runs, autograd's backward pass included."""

    def __init__(self, work: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._elements, self._work = MAX_ELEMENTS, work

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        inputs = list(_tensors((*args, *given.values())))
        if func.is_view:  # allocates nothing, so it may run before it is counted
            out = func(*args, **given)
            self._spend(_elements(_tensors((out,))), 0)
            return out
        made = _foretold(func, args, given, inputs)
        multiplied = made * inputs[-1].shape[-2] if func.overloadpacket in _PRODUCTS else 0
        self._spend(made, _cost(func) * (made + _elements(inputs)) + multiplied)
        return func(*args, **given)

    def _spend(self, made: int, work: int) -> None:
        self._elements -= made
        self._work -= CALL_WORK + work
        if self._elements < 0:
            raise LimitReached(f"its results would have more than {MAX_ELEMENTS} elements for one datum")
        if self._work < 0:
            raise LimitReached(
                "it needs more work than one datum of this batch may use; send fewer datums, or use fewer calls in "
                "the loss"
            )


def _foretold(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Tensor]) -> int:
    """Returns an upper bound of the elements in the operation's results."""
    if any(argument.is_out for argument in func._schema.arguments):
        raise TypeError("the argument `out` is not allowed")  # `out` would grow to the size of the result
    if func._schema.is_mutable or func is _ATEN._local_scalar_dense.default:
        return 0
    if torch.Tag.pointwise in func.tags and inputs:
        return prod(torch.broadcast_shapes(*(tensor.shape for tensor in inputs)))  # type: ignore[no-untyped-call]
    if func.overloadpacket in _NO_LARGER:
        return len(func._schema.returns) * _elements(inputs)
    if func is _ATEN.nonzero.default:
        return inputs[0].numel() * inputs[0].dim()
    return _elements(_tensors((_on_meta(func, args, kwargs),)))


def _cost(func: OpOverload) -> int:
    if func.overloadpacket in _SORTS:
        return _SORTED
    return 1 if torch.Tag.pointwise in func.tags or func.overloadpacket in _STREAMED else _LOOKED_UP


def _on_meta(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the result without its content. Raises torch's error where an operation's size depends on content."""
    named = {key: _meta(value) for key, value in kwargs.items()}
    if any(argument.name == "device" for argument in func._schema.arguments):
        named["device"] = torch.device("meta")
    return func(*(_meta(value) for value in args), **named)


def _meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return [_meta(part) for part in value] if isinstance(value, list | tuple) else value


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _elements(tensors: Sequence[Tensor] | Iterator[Tensor]) -> int:
    """Counts elements exactly, where numel() of an expanded tensor may overflow."""
    return sum(prod(tensor.shape) for tensor in tensors)
