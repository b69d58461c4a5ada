"""Runs custom losses: a client's graph, datum by datum on the CPU, through a fixed table of operations.

It equals what the SDK does (tinker 0.38, `run_loss_handle` in lib/public_interfaces/custom_loss.py, and `backward` in
training_client.py): it calls the traced function once a datum and adds up the losses. There is no eval here: each call
is looked up in a fixed table.

The table holds a function for each name of app/domain/losses.py, built from our own names alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.domain import losses
from app.domain.losses import FUNCTION, CustomLoss, LossCall
from app.domain.ops import Batch
from app.errors import NoMemory, UserOpError
from workers.backends.devices import moved
from workers.backends.failures import ran_out_of_memory
from workers.backends.training.losses.custom_budget import MAX_WORK, Budget

_LONGEST_TEXT = 300

Function = Callable[..., Any]
_LARGEST_EXPONENT = 64


@dataclass(frozen=True, slots=True)
class DatumValue:
    """The result of one datum: `loss` is a number, `gradient` fp32 of the shape of the datum's logprobs; all finite."""

    loss: float
    metrics: Mapping[str, float]
    gradient: Tensor


class CustomLossRun:
    """A custom loss on the datums of one Op. A datum's result depends only on the datum and the number of datums."""

    def __init__(self, loss: CustomLoss, batch: Batch) -> None:
        self.metrics = tuple(loss.metrics)
        self._loss = loss
        self._shapes = batch.inputs["target_tokens"].shapes
        self._starts = batch.inputs["target_tokens"].offsets()
        self._columns = [list(batch.inputs[given.name]) for given in loss.inputs[1:]]
        self._work = MAX_WORK // max(1, len(batch))

    def evaluate(self, datums: np.ndarray, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Returns (losses [n], each metric [n], gradient [n, L, K]) on the device of `logprobs`.

        `logprobs` are fp32 [n, L, K] with padding. A datum that fails has a loss of NaN and no gradient; `explain`
        gives the reason. The host waits for the logprobs, and not for the copies back. Raises the
        allocator's error where memory runs out.
        """
        host = logprobs.detach().cpu()
        gradient = torch.zeros_like(host)
        values = torch.zeros(1 + len(self.metrics), len(datums))  # the losses and each metric
        values[0] = torch.nan
        for row, datum in enumerate(datums.tolist()):
            where = self._where(row, datum)
            try:
                found = self.differentiate(datum, host[where].contiguous())
            except UserOpError:
                continue
            values[:, row] = torch.tensor([found.loss, *(found.metrics[name] for name in self.metrics)])
            gradient[where] = found.gradient
        losses, *metrics = moved(values, logprobs.device)
        return losses, dict(zip(self.metrics, metrics, strict=True)), moved(gradient, logprobs.device)

    def explain(self, datum: int, logprobs: Tensor) -> None:
        """Raises the UserOpError that made a datum fail; `logprobs` are those of the Op, end to end. Raises NoMemory if
        memory runs out before the reason is found again."""
        start, stop = self._starts[datum : datum + 2]
        try:
            self.differentiate(datum, logprobs[start:stop].detach().cpu().reshape(self._shapes[datum]))
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
            raise NoMemory(
                f"datum {datum}: the custom loss {self._loss.name} fails, and memory ran out before the reason was "
                "found. The model is unchanged; send the batch again"
            ) from None

    def differentiate(self, datum: int, logprobs: Tensor) -> DatumValue:
        """Computes the loss and gradient of a datum. Raises UserOpError naming the datum and the node that failed."""
        leaf = logprobs.clone().requires_grad_()
        inputs = [torch.tensor(column[datum]) for column in self._columns]
        try:
            with torch.enable_grad(), Budget(self._work, measured=self._loss.budget > 1):
                return _differentiate(self._loss, leaf, inputs)
        except _NodeFailed as error:
            raise UserOpError(
                f"datum {datum}: the custom loss {self._loss.name} fails: {error}. The model is unchanged"
            ) from None

    def _where(self, row: int, datum: int) -> tuple[int | slice, ...]:
        """Returns the index of the datum's logprobs in a padded block: [N] in its first lane, [N, K] in K lanes."""
        length, *width = self._shapes[datum]
        return (row, slice(length), slice(width[0]) if width else 0)


class _NodeFailed(Exception):
    """A datum's loss could not be computed; the text names the node."""


def _differentiate(custom: CustomLoss, leaf: Tensor, inputs: Sequence[Tensor]) -> DatumValue:
    nodes: dict[str, Any] = {given.node: value for given, value in zip(custom.inputs, (leaf, *inputs), strict=True)}
    for call in custom.calls:
        with _blaming(call.name, call.target):
            nodes[call.name] = _checked(_call(call, nodes), custom.budget)
    with _blaming(custom.loss, "the loss"):
        gradient = _gradient(nodes[custom.loss], leaf)
        loss = _finite(nodes[custom.loss])
    metrics = {}
    for name, node in custom.metrics.items():
        with _blaming(node, name):
            metrics[name] = _finite(nodes[node])
    return DatumValue(loss, metrics, gradient)


@contextmanager
def _blaming(node: str, what: str) -> Iterator[None]:
    """Turns any error into _NodeFailed: a client's graph may make torch raise anything, and the graph is at fault. It
    is not where memory ran out, since the budget bounds the memory of a datum."""
    try:
        yield
    except Exception as error:
        # The client can choose the text of other classes: torch puts a bad argument into its ValueError.
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            raise
        if type(error) is RuntimeError and ran_out_of_memory(error):
            raise
        text = str(error).partition("\n")[0][:_LONGEST_TEXT] or "no reason given"
        raise _NodeFailed(f"node {node} ({what}): {type(error).__name__}: {text}") from None


def _call(call: LossCall, nodes: Mapping[str, Any]) -> Any:
    function = (FUNCTIONS if call.kind == FUNCTION else METHODS)[call.target]
    args = [_argument(value, nodes) for value in call.args]
    return function(*args, **{key: _argument(value, nodes) for key, value in call.kwargs.items()})


def _argument(value: Any, nodes: Mapping[str, Any]) -> Any:
    if isinstance(value, tuple):
        return [_argument(part, nodes) for part in value]
    if not isinstance(value, Mapping):
        return value
    ((kind, inner),) = value.items()
    match kind:
        case "ref":
            return nodes[inner]
        case "tuple":
            return tuple(_argument(part, nodes) for part in inner)
        case "slice":
            return slice(*(_argument(part, nodes) for part in inner))
        case "dict":
            return {key: _argument(part, nodes) for key, part in inner.items()}
        case "ellipsis":
            return ...
        case "float":
            return float(inner)
    return _CONSTANTS[kind, inner]


_CONSTANTS: Mapping[tuple[str, str], Any] = {
    **{("dtype", name): getattr(torch, name) for name in losses.DTYPES},
    ("device", "cpu"): torch.device("cpu"),
    ("layout", "strided"): torch.strided,
    ("memory_format", "contiguous_format"): torch.contiguous_format,
    ("memory_format", "preserve_format"): torch.preserve_format,
}


def _checked(value: Any, budget: int) -> Any:
    """Keeps integers within the range of a tensor's size; Python's grow without bound. Raises OverflowError, and
    TypeError for a complex number, such as a root of a negative one: their operations cost up to 400 ns an element."""
    if isinstance(value, complex) and budget > 1:
        raise TypeError("the result is a complex number; take roots only of numbers that are not negative")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise OverflowError("the result is an integer beyond 64 bits")
    return value


def _gradient(loss: Any, leaf: Tensor) -> Tensor:
    if not isinstance(loss, Tensor) or loss.ndim:
        got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"the loss must be a scalar tensor, got {got}")
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on logprobs")
    (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    if gradient is None:
        raise ValueError("the loss does not depend on logprobs")
    if not gradient.isfinite().all():
        raise ValueError("the loss's gradient with respect to the logprobs is not finite")
    return gradient.detach()


def _finite(value: Any) -> float:
    """Returns a single finite number. Raises ValueError for anything else."""
    number = float(value.detach() if isinstance(value, Tensor) else value)
    if not np.isfinite(np.float32(number)):
        raise ValueError(f"it is {number}, which is not a finite 32-bit number")
    return number


def _numeric(function: Function) -> Function:
    """Restricts an operator to tensors and numbers: on texts and lists it would repeat and format, at any size."""

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
    """Gets an item of a tensor, a size, a list, or the pair that a call such as max(dim=0) gives.

    A mask becomes the positions it marks, as torch itself does inside, so that the result's size can be computed ahead.
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


_ATTRIBUTES: Mapping[str, Function] = {name: operator.attrgetter(name) for name in losses.ATTRIBUTES}


def _attribute(value: Any, name: str) -> Any:
    return _ATTRIBUTES[name](value)


def _named(name: str) -> Function:
    """Returns the function of that name, such as torch.nn.functional.relu.

    Every name is a constant of app/domain/losses.py.
    """
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    function: Function = found
    return function


_SPECIAL: Mapping[str, Function] = {
    "getattr": _attribute,
    **{f"operator.{name}": _numeric(getattr(operator, name)) for name in losses.OPERATORS},
    **{f"math.{name}": getattr(math, name) for name in losses.MATH},
    "operator.pow": _power,
    "operator.getitem": _item,
}


FUNCTIONS: Mapping[str, Function] = {
    **_SPECIAL,
    **{name: _named(name) for name in losses.FUNCTIONS if name.startswith("torch.")},
}


METHODS: Mapping[str, Function] = {name: getattr(Tensor, name) for name in losses.METHODS}
