"""Resource budget of one datum of a custom loss, checked before each torch operation starts.

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

MAX_BYTES = 2**30
"""Most bytes of all results of one datum, including views and the backward pass. A result counts 8 bytes an element
where its type is not known before it is made."""
_WIDEST = 8
MAX_WORK = 2**34
"""Most work of one Op, shared equally among its datums. The unit is one streamed element and stands for 1 ns: 17 s of a
core in all."""
CALL_WORK = 2**15
"""Work of every torch operation in addition to its elements: 33 microseconds. With its check, a small one takes 35 to
150 (a busy AMD EPYC, torch 2.13, 2026-11-28), so a call of small ones at the limit takes up to 80 s."""

_ATEN = torch.ops.aten

# Their results have no more elements than their tensors have together, so their results need not be computed ahead.
_NO_LARGER_NAMES = """
    _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data _to_copy alias all amax amin any argmax
    argmin cat clone copy count_nonzero cummax cummin cumprod cumsum detach flip gather index_put log_sigmoid_backward
    log_sigmoid_forward logcumsumexp logsumexp max mean min ones_like prod scatter scatter_add sort std sum topk tril
    triu var zeros_like
"""
_NO_LARGER = frozenset(getattr(_ATEN, name) for name in _NO_LARGER_NAMES.split())
_DIVISIONS = frozenset({_ATEN.div, _ATEN.div_})
_PRODUCTS = frozenset({_ATEN.mm, _ATEN.bmm, _ATEN.addmm, _ATEN.baddbmm})

# Cost of an element of pointwise operations that take more than 3 ns an element: of fp32 and narrower types, of fp64,
# and of integers. Each is the next power of two above the slowest of 2^16 elements, denormal and huge ones included
# (torch 2.13 on one core of a Xeon, 2026-11-25: pow of int64 640 ns, logit 270 ns, remainder of fp64 135 ns; denormal
# numbers on another Xeon, 2026-11-30: gelu of fp64 270 ns, sinh and tanh 160, special_entr of fp32 125).
_PRICES: Mapping[str, tuple[int, int, int]] = {
    "pow": (64, 128, 1024),
    "logit": (256, 256, 512),
    **dict.fromkeys(("remainder", "fmod", "floor_divide"), (64, 256, 32)),
    "sqrt": (32, 128, 32),
    "gelu": (64, 512, 4),
    "gelu_backward": (32, 256, 4),
    "tanh": (32, 256, 16),
    **dict.fromkeys(("expm1", "sinh", "cosh"), (64, 256, 4)),
    **dict.fromkeys(("sigmoid", "silu", "silu_backward", "softplus", "softplus_backward"), (64, 128, 4)),
    **dict.fromkeys(("exp2", "hypot", "log1p"), (64, 64, 4)),
    **dict.fromkeys(("special_entr", "xlogy"), (256, 256, 32)),
    **dict.fromkeys(("log", "log2", "log10"), (64, 64, 64)),
    **dict.fromkeys(("digamma", "lgamma", "erfc"), (128, 128, 32)),
    **dict.fromkeys(("acos", "asin", "atan", "cos", "exp", "sin", "tan"), (32, 64, 16)),
}
_POINTWISE = (4, 8, 4)

# Budgets of version 1 count every pointwise operation as 1. Operations that look elements up, or work in short rows,
# took up to 40 ns an element; sorting 4 million took up to 150 ns an element. Of denormal numbers, the cross-entropy of
# two tensors took 270 ns an element, and logsigmoid 115.
_SLOWEST, _LOOKED_UP = 64, 16
_SLOW = frozenset(
    {
        *(_ATEN.sort, _ATEN.topk, _ATEN.median, _ATEN.nanmedian),
        *(_ATEN.binary_cross_entropy, _ATEN.binary_cross_entropy_with_logits),
    }
)
_STREAMED_NAMES = """
    _to_copy alias amax amin arange cat clone copy cumprod cumsum detach flip full log_sigmoid_backward
    max mean min ones ones_like prod sum zeros zeros_like
"""
_STREAMED = frozenset(getattr(_ATEN, name) for name in _STREAMED_NAMES.split()) | _PRODUCTS


class LimitReached(Exception):
    """The loss would exceed the budget of a datum."""


class Budget(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every torch operation of one datum, autograd's included, before it runs; a view, which allocates nothing,
    after it. An operation raises LimitReached over the budget, and TypeError for `out` and, in version 2, for complex
    numbers. It raises OverflowError for a quotient of integers that is too large for them.

    `measured`: it uses the costs of version 2. Version 1, of losses journalled before, has one cost for all pointwise
    operations, 8 bytes for each element, and takes complex numbers.
    """

    def __init__(self, work: int, *, measured: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bytes, self._work, self._measured = MAX_BYTES, work, measured

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        inputs = list(_tensors((*args, *given.values())))
        if func.is_view:  # allocates nothing, so it may run before it is counted
            out = func(*args, **given)
            self._spend(sum(part.numel() * self._width(part) for part in _tensors((out,))), CALL_WORK)
            return out
        if self._measured and any(tensor.is_complex() for tensor in inputs):
            raise TypeError("complex tensors are not allowed")
        made = foretold(func, args, given, inputs)
        width = _result_width(func, given, inputs) if self._measured else _WIDEST
        self._spend(made * width, work(func, inputs, made, measured=self._measured))
        if func.overloadpacket in _DIVISIONS and given.get("rounding_mode") == "trunc":
            _check_quotient(args[0], args[1])  # once its size is known to fit
        return func(*args, **given)

    def _width(self, tensor: Tensor) -> int:
        return tensor.itemsize if self._measured else _WIDEST

    def _spend(self, made: int, work: int) -> None:
        self._bytes -= made
        self._work -= work
        if self._bytes < 0:
            raise LimitReached(f"its results would have more than {MAX_BYTES} bytes for one datum")
        if self._work < 0:
            raise LimitReached(
                "it needs more work than one datum of this batch may use; send fewer datums, or use fewer calls in "
                "the loss"
            )


def foretold(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Tensor]) -> int:
    """Returns an upper bound of the elements in the operation's results."""
    if any(argument.is_out for argument in func._schema.arguments):
        raise TypeError("the argument `out` is not allowed")  # `out` would grow to the size of the result
    if func._schema.is_mutable or func is _ATEN._local_scalar_dense.default:
        return 0
    if torch.Tag.pointwise in func.tags and inputs:
        return prod(torch.broadcast_shapes(*(tensor.shape for tensor in inputs)))  # type: ignore[no-untyped-call]
    # A sum over no rows has elements.
    if func.overloadpacket in _NO_LARGER and all(0 not in tensor.shape for tensor in inputs):
        return len(func._schema.returns) * _elements(inputs)
    if func is _ATEN.nonzero.default:
        return inputs[0].numel() * inputs[0].dim()
    return _elements(_tensors((_on_meta(func, args, kwargs),)))


def _check_quotient(dividend: Any, divisor: Any) -> None:
    """Raises OverflowError for the least integer divided by -1: x86 processors end the process for it."""
    dtype = torch.result_type(dividend, divisor)
    if dtype.is_floating_point or dtype is torch.bool:
        return
    above, below = (torch.as_tensor(number).to(dtype) for number in (dividend, divisor))
    if ((above == torch.iinfo(dtype).min) & (below == -1)).any():
        raise OverflowError(f"the least {dtype} divided by -1 is too large for it")


def work(func: OpOverload, inputs: Sequence[Tensor], made: int, *, measured: bool = True) -> int:
    """Returns the work of an operation whose results have `made` elements."""
    multiplied = made * inputs[-1].shape[-2] if func.overloadpacket in _PRODUCTS else 0
    if measured and torch.Tag.pointwise in func.tags:
        return CALL_WORK + _price(func, inputs) * made + _elements(inputs)
    return CALL_WORK + _cost(func) * (made + _elements(inputs)) + multiplied


def _price(func: OpOverload, inputs: Sequence[Tensor]) -> int:
    plain, double, whole = _PRICES.get(func._schema.name.removeprefix("aten::").removesuffix("_"), _POINTWISE)
    if any(tensor.dtype == torch.float64 for tensor in inputs):
        return double
    return plain if any(tensor.is_floating_point() for tensor in inputs) else whole


def _result_width(func: OpOverload, kwargs: Mapping[str, Any], inputs: Sequence[Tensor]) -> int:
    """Returns an upper bound of the bytes of an element of the results."""
    if isinstance(kwargs.get("dtype"), torch.dtype):
        width: int = kwargs["dtype"].itemsize
        return width
    is_pointwise = torch.Tag.pointwise in func.tags
    # An integer and a number give fp32.
    return max(4, *(tensor.itemsize for tensor in inputs)) if is_pointwise and inputs else _WIDEST


def _cost(func: OpOverload) -> int:
    if func.overloadpacket in _SLOW:
        return _SLOWEST
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
    return sum(tensor.numel() for tensor in tensors)
