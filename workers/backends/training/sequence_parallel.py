"""Sequence parallelism: the ranks of a group share the tokens of each micro-batch (DeepSpeed Ulysses).

A rank runs embeddings, norms, MLPs and the head on its own consecutive tokens. For attention an all-to-all gives each
rank all tokens of its share of the heads, and another one brings them back. Source: Jacobs et al., "DeepSpeed Ulysses:
System Optimizations for Enabling Training of Extreme Long Sequence Transformer Models", 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from app.errors import SetupError
from workers.backends.training import packing
from workers.backends.training.ranks import RankGroup

NAME = "tinsmith_packed_over_ranks"


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """`size` ranks that share micro-batches; `rank` is this one's number among them, and `group` their process group.

    With one rank `group` is None, and every method gives the whole back.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    @classmethod
    def of(cls, ranks: RankGroup, size: int) -> SequenceGroup:
        """Makes this rank's group of `size` neighbours. A collective. Raises SetupError where they do not add up."""
        if ranks.size % size:
            raise SetupError(
                f"trainer.sequence_parallel is {size}, but trainer.ranks is {ranks.size}: the ranks must be a multiple"
            )
        if size == 1:
            return cls()
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks.size, size)]
        return cls(ranks.rank % size, size, groups[ranks.rank // size])

    def missing(self, tokens: int) -> int:
        """Returns the number of tokens to add, so that each rank has equally many."""
        return -tokens % self.size

    def own(self, tokens: int) -> slice:
        """Returns this rank's rows of so many tokens. The last ranks may have fewer rows than the others, or none."""
        most = -(-tokens // self.size)
        return slice(min(self.rank * most, tokens), min((self.rank + 1) * most, tokens))

    def assembled(self, own: Tensor, tokens: int) -> Tensor:
        """Returns [tokens, ...] on every rank, from the own rows of each. A collective."""
        if self.size == 1:
            return own
        whole = own.new_zeros(tokens, *own.shape[1:])
        whole[self.own(tokens)] = own
        dist.all_reduce(whole, group=self.group)
        return whole


ALONE = SequenceGroup()


def check(model: Any, size: int, *, packed: bool) -> None:
    """Raises SetupError where `size` ranks cannot share the tokens of `model`, a transformers PreTrainedModel."""
    layers = model.config.get_text_config().per_layer_config  # Gemma 4's layers differ in key-value heads
    uneven = next((one for one in layers if one.num_attention_heads % size or one.num_key_value_heads % size), None)
    reason = None
    if not packed:
        reason = "its datums are padded"
    elif hasattr(model.config, "vision_config"):
        reason = "it reads images"
    elif packing.datum_by_datum(model):
        reason = "it has layers that must see a datum from its first token on"
    elif uneven is not None:
        reason = (
            f"its {uneven.num_attention_heads} heads and {uneven.num_key_value_heads} key-value heads cannot be shared "
            f"by {size} ranks"
        )
    if reason:
        raise SetupError(f"{type(model).__name__} cannot run with trainer.sequence_parallel = {size}: {reason}")


def over_ranks(attention: Callable[..., tuple[Tensor, None]], group: SequenceGroup) -> Callable[..., Any]:
    """Returns the attention function for a rank's own tokens, from the one for all tokens."""
    from deepspeed.sequence.layer import DistributedAttention

    class Local(nn.Module):
        """`attention` with tokens before heads, [1, T, heads, D], as DeepSpeed has them."""

        def forward(self, q: Tensor, k: Tensor, v: Tensor, module: nn.Module, settings: dict[str, Any]) -> Tensor:
            whole = (tensor.transpose(1, 2) for tensor in (q, k, v))
            return attention(module, *whole, None, **settings)[0]

    shared = DistributedAttention(Local(), group.group, scatter_idx=2, gather_idx=1)

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        s_aux: Tensor | None = None,
        **settings: Any,
    ) -> tuple[Tensor, None]:
        own = None if s_aux is None else s_aux.chunk(group.size)[group.rank]
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return shared(q, k, v, 0, None, module, {**settings, "s_aux": own}), None

    return attend
