"""Reads a block of hidden states through value heads: first their values, then, the loss being known, the way back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from workers.training.head import Segments


class Valuing:
    """hidden [T, hidden size]; the segments add up to T, and their adapters are critics. Computed in fp32.

    `scores`: the values, fp32 [T, 1]; `entropy`: None, since there is no distribution. As for a Reading.
    """

    entropy: Tensor | None = None

    def __init__(self, hidden: Tensor, segments: Segments) -> None:
        self._hidden, self._segments = hidden, segments
        self.scores = torch.cat([hidden[rows].float() @ head.t() for head, rows in self._heads()])

    def gradient(self, seed: Tensor) -> Tensor:
        """The one in `hidden`, of its dtype, from that in the values, fp32 [T, 1].

        The heads' own gradients are added to their `.grad`.
        """
        found = torch.empty_like(self._hidden)
        for head, rows in self._heads():
            found[rows] = seed[rows] @ head
            of_head = seed[rows].t() @ self._hidden[rows].float()
            head.grad = of_head if head.grad is None else head.grad.add_(of_head)
        return found

    def _heads(self) -> Iterator[tuple[Tensor, slice]]:
        start = 0
        for adapter, count in self._segments:
            assert adapter is not None and adapter.value_head is not None
            yield adapter.value_head, slice(start, start + count)
            start += count
