"""Policy outputs (logprobs) and value outputs of a critic from hidden states, chunk by chunk, and their backward pass.

The outputs of a chunk come first; the backward pass follows once the loss is known.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from workers.backends.training.lm_head import LmHead, Scored, Segments
from workers.models.lora import Adapter

# Rows of logits made at once. On a CPU more rows gain nothing, and fewer rows read the head's weight too often; a GPU
# wants larger products.
CHUNK_ROWS = {"cpu": 256, "cuda": 2048}
# Elements of a block's logits that are kept until its loss is known: 128 MB in bf16. Beyond this they are recomputed.
_KEPT_ELEMENTS = 2**26
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
        step = CHUNK_ROWS[hidden.device.type]
        self._chunks = [slice(start, min(start + step, len(hidden))) for start in range(0, len(hidden), step)]
        found, entropies = [], []
        for rows in self._chunks:
            scored = head.score(hidden[rows], targets[rows], list(self._owners(rows)), entropy=entropy)
            found.append(scored.logprobs)
            entropies.append(scored.entropy)
            if keep and len(hidden) * scored.exps.shape[1] <= _KEPT_ELEMENTS:
                self._kept.append(scored)
        self.scores = torch.cat(found)
        self.entropy = torch.cat([one for one in entropies if one is not None]) if entropy else None

    def gradient(self, seed: Tensor) -> Tensor:
        """Returns the gradient in `hidden`, of its dtype, from the gradient in the logprobs, fp32 [T, K]. Called once.

        Rows where `seed` is 0 (prompts) cost nothing. Trained parts of the head get their gradient: see
        LmHead.backward."""
        found = torch.zeros_like(self._hidden)
        for i, rows in enumerate(self._chunks):
            wanted = seed[rows].ne(0).any(-1)
            count = int(wanted.sum())
            if count > _WORTH_PICKING * len(wanted):
                found[rows] = self._head.backward(self._scored(i), seed[rows])
            elif count:
                found[rows][wanted] = self._head.backward(self._scored(i).only(wanted), seed[rows][wanted])
        return found

    def _scored(self, chunk: int) -> Scored:
        if self._kept:
            return self._kept[chunk]
        rows = self._chunks[chunk]
        return self._head.score(self._hidden[rows], self._targets[rows], list(self._owners(rows)))

    def _owners(self, rows: slice) -> Iterator[tuple[Adapter | None, int]]:
        """Yields the segments within `rows`."""
        start = 0
        for adapter, count in self._segments:
            within = min(start + count, rows.stop) - max(start, rows.start)
            start += count
            if within > 0:
                yield adapter, within


class ValueOutputs:
    """Value outputs of hidden [T, hidden size]. The segments add up to T, and their adapters are critics.

    Computed in fp32. `scores`: the values, fp32 [T, 1]; `entropy`: None, since there is no distribution. Used like a
    PolicyOutputs.
    """

    entropy: Tensor | None = None

    def __init__(self, hidden: Tensor, segments: Segments) -> None:
        self._hidden, self._segments = hidden, segments
        self.scores = torch.cat([hidden[rows].float() @ head.t() for head, rows in self._heads()])

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
