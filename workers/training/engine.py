"""The base, ready to be run: what differs between plain torch and DeepSpeed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from workers.base_model import LoadedBase
from workers.lora import LoraLinear
from workers.training.architectures import LogitRule, logit_rule
from workers.training.head import Head, WeightGradient
from workers.training.ranks import RankGroup
from workers.training.trunk import Trunk

_HEAD = "lm_head"


@dataclass(frozen=True, kw_only=True, eq=False)
class Engine(ABC):
    """A loaded base: frozen, its linears wrapped (workers/lora.py), or itself trained.

    `trained`: the base's own parameters by name, if they are. `shards_optimizer`: the ranks share out each model's
    optimizer state, and with `shards_gradients` the gradients of the base's parameters. `in_step`: every rank must run
    the same number of passes, because a forward or backward is itself a collective.
    """

    base: LoadedBase
    trunk: Trunk
    ranks: RankGroup
    trained: Mapping[str, nn.Parameter] = field(default_factory=dict)
    shards_optimizer: bool = False
    shards_gradients: bool = False
    in_step: bool = False
    head_gradient: WeightGradient = field(default_factory=WeightGradient)

    @contextmanager
    def head(self) -> Iterator[Head]:
        """What makes logprobs of the trunk's output; its weight is whole within the block, so this is a collective."""
        rule = logit_rule(self.base.model)
        if rule is None:
            yield Head(None, _HEAD, LogitRule())
            return
        linear = self.base.model.get_submodule(_HEAD)
        weight = (linear.base if isinstance(linear, LoraLinear) else linear).weight
        with self.whole(weight):
            yield Head(weight.detach(), _HEAD, rule, self.head_gradient if self.trained else None)

    def head_name(self) -> str:
        """What `trained` calls the head's weight: that of the embedding where they are tied."""
        weight = self.base.model.get_output_embeddings().weight
        return next(name for name, parameter in self.trained.items() if parameter is weight)

    def whole(self, parameter: Tensor) -> AbstractContextManager[None]:
        """Within it, all of `parameter` is on this rank."""
        return nullcontext()

    def write(self, parameter: nn.Parameter, value: Tensor | None, owner: int) -> None:
        """Every rank's `parameter` becomes `value`, cast; only rank `owner` need give one. A collective."""
        with torch.no_grad():
            if value is not None:
                parameter.copy_(value)
        if self.shards_optimizer:
            self.ranks.broadcast_([parameter], owner)

    def rest(self) -> None:
        """Called after a pass: free what only the next one needs."""
        return

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """The trainer's class, ZeRO stage (None without DeepSpeed) and base elements held here, read live."""


class TorchEngine(Engine):
    """transformers' model as it is, in one process."""

    def describe(self) -> Mapping[str, Any]:
        return {
            "trainer": type(self.base.model).__name__,
            "zero_stage": None,
            "base_elements_held": elements_held(self.base.model),
        }


def elements_held(model: nn.Module) -> int:
    """Elements of the model's parameters that this process holds now; ZeRO-3 empties them between uses."""
    return sum(parameter.numel() for parameter in model.parameters())
