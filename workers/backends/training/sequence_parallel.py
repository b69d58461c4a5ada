"""Sequence parallelism: the ranks of a group share the tokens of each micro-batch (DeepSpeed Ulysses).

A rank runs embeddings, norms, MLPs and the head on its own consecutive tokens. For attention an all-to-all gives each
rank all tokens of its share of the heads, and another one brings them back. Source: Jacobs et al., "DeepSpeed Ulysses:
System Optimizations for Enabling Training of Extreme Long Sequence Transformer Models", 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from app.errors import SetupError
from workers.backends.training import packing
from workers.backends.training.ranks import RankGroup

NAME = "tinsmith_packed_over_ranks"
_SETTING = "trainer.sequence_parallel"


@dataclass(frozen=True, slots=True)
class ModelParallelGroup:
    """`size` ranks that share micro-batches; `rank` is this one's number among them, and `group` their process group.

    Each computes the outputs of its own consecutive tokens, whether the layers before them ran on these tokens
    (trainer.sequence_parallel) or on all (trainer.tensor_parallel). With one rank `group` is None, and every method
    gives the whole back.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    @classmethod
    def of(cls, ranks: RankGroup, size: int, setting: str = _SETTING) -> ModelParallelGroup:
        """Makes this rank's group of `size` neighbours, as `setting` says. A collective. Raises SetupError where they
        do not add up."""
        if ranks.size % size:
            raise SetupError(f"{setting} is {size}, but trainer.ranks is {ranks.size}: the ranks must be a multiple")
        if size == 1:
            return cls()
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks.size, size)]
        return cls(ranks.rank % size, size, groups[ranks.rank // size])

    def missing(self, tokens: int) -> int:
        """Returns the number of tokens to add, so that each rank has equally many."""
        return -tokens % self.size

    def own(self, tokens: int) -> slice:
        """Returns this rank's rows of `tokens` tokens. The last ranks may have fewer rows than the others, or none."""
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


ALONE = ModelParallelGroup()


def own_rows(whole: Tensor, group: ModelParallelGroup) -> Tensor:
    """Returns this rank's rows of [tokens, width], which every rank of the group has whole. So is its gradient on every
    rank: the backward pass is a collective."""
    return _OwnRows.apply(whole, group)  # type: ignore[no-any-return,no-untyped-call]


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: ModelParallelGroup) -> Tensor:
        ctx.group, ctx.tokens = group, len(whole)
        return whole[group.own(len(whole))].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.group.assembled(grads[0], ctx.tokens), None


def check(model: Any, size: int, *, packed: bool, setting: str = _SETTING, one_for_several: bool = False) -> None:
    """Raises SetupError where `size` ranks cannot share the tokens or the heads of `model`, a transformers
    PreTrainedModel, as `setting` says. `one_for_several`: as many ranks may have a key-value head in common."""
    layers = model.config.get_text_config().per_layer_config  # Gemma 4's layers differ in key-value heads
    uneven = next((one for one in layers if not _shares_heads(one, size, one_for_several)), None)
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
        raise SetupError(f"{type(model).__name__} cannot run with {setting} = {size}: {reason}")


def _shares_heads(layer: Any, size: int, one_for_several: bool) -> bool:
    heads, kv_heads = layer.num_attention_heads, layer.num_key_value_heads
    return heads % size == 0 and (kv_heads % size == 0 or (one_for_several and size % kv_heads == 0))


def over_ranks(attention: Callable[..., tuple[Tensor, None]], group: ModelParallelGroup) -> Callable[..., Any]:
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
