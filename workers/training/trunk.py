"""The base up to where logits are made, over the tokens of many datums at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from app.errors import SetupError
from app.settings import TrainerSettings
from workers import lora
from workers.lora import Adapter
from workers.training import attention
from workers.training.architectures import logit_rule

Owners = Sequence[tuple[Adapter | None, int]]
"""Consecutive datums by whose adapter they run under: (adapter, number of datums)."""


class Trunk(nn.Module):
    """Gives the last hidden states where the architecture is known (workers/training/architectures.py) or they are all
    that is wanted; else logits.

    `packed`: datums lie end to end and no token is padding; else they are padded on the right to the longest.
    """

    def __init__(self, model: Any, trainer: TrainerSettings) -> None:
        """`model` is a transformers PreTrainedModel; a known one computes attention as in attention.py from here on.

        Raises SetupError when `trainer` wants activation checkpointing and the model has no layers made for it.
        """
        super().__init__()
        self.model = model
        self.packed = logit_rule(model) is not None
        if self.packed:
            model.set_attn_implementation(attention.NAME)
        if trainer.activation_checkpointing:
            _checkpoint_layers(model)

    def forward(self, tokens: Tensor, lengths: Sequence[int], owners: Owners, *, hidden: bool = False) -> Tensor:
        """int64 [T], the datums' tokens end to end -> [T, hidden size], or [T, vocabulary] unless `hidden`."""
        return self._packed(tokens, lengths, owners) if self.packed else self._padded(tokens, lengths, owners, hidden)

    def _packed(self, tokens: Tensor, lengths: Sequence[int], owners: Owners) -> Tensor:
        positions = torch.cat([torch.arange(length, device=tokens.device) for length in lengths])
        with lora.use(_segments(owners, lengths)):
            output = self.model.base_model(
                tokens[None], position_ids=positions[None], use_cache=False, runs=attention.runs_of(lengths)
            )
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    def _padded(self, tokens: Tensor, lengths: Sequence[int], owners: Owners, hidden: bool) -> Tensor:
        longest = max(lengths)
        real = torch.arange(longest) < torch.tensor(lengths)[:, None]
        real = real.to(tokens.device)
        rows = torch.zeros(real.shape, dtype=tokens.dtype, device=tokens.device).masked_scatter_(real, tokens)
        with lora.use(_segments(owners, [longest] * len(lengths))):
            if hidden:
                return self.model.base_model(rows, use_cache=False).last_hidden_state[real]  # type: ignore[no-any-return]
            return self.model(rows, use_cache=False).logits[real]  # type: ignore[no-any-return]


def _checkpoint_layers(model: Any) -> None:
    """Keep a layer's input alone from forward to backward, which then runs the layer again under the same adapters.

    Only the layers go to train mode, not what is in them: there is no dropout here.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise SetupError(f"{type(model).__name__} cannot run with trainer.activation_checkpointing; turn it off")
    call = partial(
        torch.utils.checkpoint.checkpoint, use_reentrant=False, context_fn=_contexts, preserve_rng_state=False
    )
    for layer in layers:
        layer.training, layer.gradient_checkpointing = True, True
        layer._gradient_checkpointing_func = call


def _contexts() -> tuple[Any, Any]:
    """The autograd thread of a GPU has context variables of its own, hence the second."""
    return nullcontext(), lora.use(lora.in_use())


def _segments(owners: Owners, lengths: Sequence[int]) -> list[tuple[Adapter | None, int]]:
    """Owners by tokens."""
    ends = torch.tensor([count for _, count in owners]).cumsum(0).tolist()
    starts = [0, *ends]
    return [(adapter, sum(lengths[start:end])) for (adapter, _), start, end in zip(owners, starts, ends, strict=False)]
