"""What each name of app/domain/custom_ops.py runs: a fixed table, made of our own names alone."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from app.domain import custom_ops

Function = Callable[..., Any]
_LARGEST_EXPONENT = 64


def _numeric(function: Function) -> Function:
    """Of tensors and numbers only: on texts and lists the same operators repeat and format, at any size."""

    def guarded(*operands: Any) -> Any:
        for operand in operands:
            if not isinstance(operand, Tensor | int | float):
                raise TypeError(f"{function.__name__} takes tensors and numbers, not a {type(operand).__name__}")
        return function(*operands)

    return guarded


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and abs(exponent) > _LARGEST_EXPONENT:
        raise OverflowError(f"an exponent of {exponent} is too large for an integer")
    return _numeric(operator.pow)(base, exponent)


def _item(container: Any, key: Any) -> Any:
    """Of a tensor, a size, a list, or the pair that a call such as max(dim=0) gives.

    A mask becomes the positions it marks, as torch itself does inside, so that the result's size can be foretold.
    """
    if isinstance(container, tuple | list):
        return container[key]
    if not isinstance(container, Tensor):
        raise TypeError(f"only tensors and lists of them have items, not a {type(container).__name__}")
    keys = key if isinstance(key, tuple) else (key,)
    return container[tuple(position for part in keys for position in _positions(part))]


def _positions(key: Any) -> tuple[Any, ...]:
    if not isinstance(key, Tensor) or key.dtype != torch.bool:
        return (key,)
    if not key.ndim:
        raise IndexError("a mask must have at least one dimension")
    return torch.nonzero(key, as_tuple=True)


_ATTRIBUTES: Mapping[str, Function] = {
    "T": lambda value: value.T,
    "device": lambda value: value.device,
    "dtype": lambda value: value.dtype,
    "indices": lambda value: value.indices,
    "mT": lambda value: value.mT,
    "ndim": lambda value: value.ndim,
    "shape": lambda value: value.shape,
    "values": lambda value: value.values,
}


def _attribute(value: Any, name: str) -> Any:
    return _ATTRIBUTES[name](value)


def _named(name: str) -> Function:
    """torch.nn.functional.relu by that name; every name is a constant of app/domain/custom_ops.py."""
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    function: Function = found
    return function


_SPECIAL: Mapping[str, Function] = {
    "getattr": _attribute,
    **{f"operator.{name}": _numeric(getattr(operator, name)) for name in custom_ops.OPERATORS},
    **{f"math.{name}": getattr(math, name) for name in custom_ops.MATH},
    "operator.pow": _power,
    "operator.getitem": _item,
}

FUNCTIONS: Mapping[str, Function] = {
    **_SPECIAL,
    **{name: _named(name) for name in custom_ops.FUNCTIONS if name.startswith("torch.")},
}
METHODS: Mapping[str, Function] = {name: getattr(Tensor, name) for name in custom_ops.METHODS}
