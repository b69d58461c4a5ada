"""The frozen base, ready to be run: what differs between plain torch and DeepSpeed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from workers.base_model import LoadedBase
from workers.training.ranks import RankGroup


@dataclass(frozen=True, kw_only=True, eq=False)
class Engine(ABC):
    """A loaded base whose linears are wrapped (workers/lora.py).

    `shards_optimizer`: the ranks share out each adapter's optimizer state. `in_step`: every rank must run the same
    number of passes, because a forward or backward is itself a collective.
    """

    base: LoadedBase
    ranks: RankGroup
    shards_optimizer: bool = False
    in_step: bool = False

    @abstractmethod
    def logits(self, tokens: Tensor) -> Tensor:
        """int64 [B, L] -> [B, L, V] in the base's dtype, causal, no padding mask (rows are padded on the right)."""

    def rest(self) -> None:
        """Called after a pass: free what only the next one needs."""
        return

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """The trainer's class, ZeRO stage (None without DeepSpeed) and base elements held here, read live."""


class TorchEngine(Engine):
    """transformers' model as it is, in one process."""

    def logits(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.base.model(tokens, use_cache=False).logits
        return output

    def describe(self) -> Mapping[str, Any]:
        return {
            "trainer": type(self.base.model).__name__,
            "zero_stage": None,
            "base_elements_held": elements_held(self.base.model),
        }


def elements_held(model: nn.Module) -> int:
    """Elements of the model's parameters that this process holds now; ZeRO-3 empties them between uses."""
    return sum(parameter.numel() for parameter in model.parameters())
