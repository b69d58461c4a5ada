"""A custom loss as data: what the client's function reads, the calls it makes, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FUNCTION, METHOD = "call_function", "call_method"


@dataclass(frozen=True, slots=True)
class LossInput:
    """One parameter, for every datum: `rank` 0 is a number, 1 is [T], 2 is [T, K]. `node` is its name in calls."""

    name: str
    rank: int
    node: str


@dataclass(frozen=True, slots=True)
class LossCall:
    """`kind` is FUNCTION or METHOD, `target` a name of app/domain/custom_ops.py.

    An argument is None, a bool, int, float or text, a tuple (which stands for a list), or a dict of one key: ref (the
    name of an earlier node), tuple, dict, slice, ellipsis, float, dtype, device, layout or memory_format.
    """

    name: str
    kind: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """`inputs`: logprobs first. `loss` and the values of `metrics` name nodes; its keys are custom/<name>:sum|mean."""

    name: str
    inputs: tuple[LossInput, ...]
    calls: tuple[LossCall, ...]
    loss: str
    metrics: Mapping[str, str]

    @property
    def columns(self) -> dict[str, int]:
        """The loss_fn_inputs each datum needs, and their ranks; logprobs have the shape of the target_tokens."""
        return {"target_tokens": self.inputs[0].rank} | {given.name: given.rank for given in self.inputs[1:]}
