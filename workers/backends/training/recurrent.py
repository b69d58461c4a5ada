"""Layers that carry a state from token to token, over datums that lie end to end in one row.

Such a layer is a short convolution with Gated DeltaNet, Kimi delta attention or Mamba2 behind it. The forward of
transformers carries the state over the whole row, so a datum would see the one before it. `reset_at_datums` runs the
datums as rows of their own, each from the empty state. Neighbours of one length are one call. The norms, MLPs and
experts around the layer still see all datums at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workers.models import lora

Run = tuple[int, int]
"""(number of datums, tokens of each): adjacent datums of the same length share one call."""


def layers(model: nn.Module) -> list[nn.Module]:
    """Returns the layers with a state: transformers gives each of them its convolution over tokens as `conv1d`."""
    return [module for module in model.modules() if isinstance(getattr(module, "conv1d", None), nn.Conv1d)]


def reset_at_datums(model: nn.Module) -> None:
    """Makes the layers with a state take the keyword `runs`, and start each of its datums from the empty state."""
    for layer in layers(model):
        _reset_at_datums(layer)


def _reset_at_datums(layer: Any) -> None:
    forward = layer.forward

    def packed(hidden_states: Tensor, *, runs: Sequence[Run], **others: Any) -> Tensor:
        """Maps [1, T, hidden size] to the same; the runs add up to T."""
        parts, start, segments = [], 0, lora.in_use()
        for count, length in runs:
            rows = slice(start, start + count * length)
            start = rows.stop
            with lora.use(list(lora.within(segments, rows))):
                part = forward(hidden_states[0, rows].view(count, length, -1), **others)
            parts.append(part.flatten(0, 1))
        return torch.cat(parts)[None]

    layer.forward = packed
