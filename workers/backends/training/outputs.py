"""The outputs of hidden states: logprobs of a policy, or values of a critic.

The outputs of a chunk come first; the backward pass follows once the loss is known.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from workers.backends.devices import moved
from workers.backends.training.lm_head import LmHead, Scored, chunk_sizes
from workers.models import lora
from workers.models.adapter import Segments

# Picking rows copies them. The copy pays once a quarter of the rows are left out.
_WORTH_PICKING = 0.75


class PolicyOutputs:
    """Policy outputs of hidden [T, hidden size] for targets int64 [T, K]; the segments add up to T.

    `scores`: the logprobs, fp32 [T, K]; `entropy`: fp32 [T, 1] if it was asked for.
    """

    def __init__(
        self,
        head: LmHead,
        hidden: Tensor,
        targets: Tensor,
        segments: Segments,
        *,
        keep: bool,
        entropy: bool = False,
    ) -> None:
        """`keep`: `gradient` will be called."""
        self._head, self._hidden, self._targets, self._segments = head, hidden, targets, segments
        self._kept: list[Scored] = []
        wide = hidden.shape[1] if head.weight is None else len(head.weight)
        sizes = chunk_sizes(hidden.device)
        step = sizes.rows_of(wide)
        self._chunks = [slice(start, min(start + step, len(hidden))) for start in range(0, max(1, len(hidden)), step)]
        found, entropies = [], []
        for rows in self._chunks:
            scored = head.score(hidden[rows], targets[rows], list(lora.within(self._segments, rows)), entropy=entropy)
            found.append(scored.logprobs)
            entropies.append(scored.entropy)
            if keep and len(hidden) * scored.exps.shape[1] <= sizes.kept:
                self._kept.append(scored)
            del scored  # else two chunks' logits are in memory at once
        self.scores = torch.cat(found)
        self.entropy = torch.cat([one for one in entropies if one is not None]) if entropy else None

    def gradient(self, seed: Tensor) -> Tensor:
        """Returns the gradient in `hidden`, of its dtype, from the gradient in the logprobs, fp32 [T, K]. Called once.

        Leaves out the rows where `seed` is 0 (prompts) if they are at least a quarter of their chunk. Trained parts of
        the head get their gradient: see LmHead.backward."""
        found = torch.zeros_like(self._hidden)
        every = seed.ne(0).any(-1).cpu()  # a GPU waits here, once for all chunks
        for i, rows in enumerate(self._chunks):
            wanted = every[rows]
            count = int(wanted.sum())
            if count > _WORTH_PICKING * len(wanted):
                found[rows] = self._head.backward(self._scored(i), seed[rows])
            elif count:
                chosen = moved(wanted.nonzero()[:, 0], seed.device)
                found[rows][chosen] = self._head.backward(self._scored(i).only(wanted), seed[rows][chosen])
        return found

    def _scored(self, chunk: int) -> Scored:
        if self._kept:
            return self._kept[chunk]
        rows = self._chunks[chunk]
        return self._head.score(self._hidden[rows], self._targets[rows], list(lora.within(self._segments, rows)))


class ValueOutputs:
    """Value outputs of hidden [T, hidden size]. The segments add up to T, and their adapters are critics.

    Computed in fp32. `scores`: the values, fp32 [T, 1]; `entropy`: None, since there is no distribution. Used like a
    PolicyOutputs.
    """

    entropy: Tensor | None = None

    def __init__(self, hidden: Tensor, segments: Segments) -> None:
        self._hidden, self._segments = hidden, segments
        none = hidden.new_zeros(0, 1, dtype=torch.float32)
        self.scores = torch.cat([none, *(hidden[rows].float() @ head.t() for head, rows in self._heads())])

    def gradient(self, seed: Tensor) -> Tensor:
        """Returns the gradient in `hidden`, of its dtype, from the gradient in the values, fp32 [T, 1].

        Adds the heads' own gradients to their `.grad`.
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
