"""torch's attention over datums of any lengths, which has kernels for GPUs alone, by its documentation and on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def forward(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Maps query [T, heads, D], key and value [T, kv heads, D] to [T, heads, D], and to the logarithms of the softmax's
    sums, fp32 [heads, T]."""
    scale, window_size = others[4:6]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = query.new_empty(query.shape[1::-1], dtype=torch.float32)
    for rows in _datums(ends):
        scores, values = _scores(query[rows], key[rows], scale, window_size), _repeated(value[rows], query)
        out[rows] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), values).to(query.dtype)
        lse[:, rows] = scores.logsumexp(-1)
    return out, lse, torch.empty(0)


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, ends: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value, from `out` and `lse` as a GPU's kernels do."""
    scale, window_size = others[-2:]
    found = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
    for rows in _datums(ends):
        q, k, v = query[rows].float(), _repeated(key[rows], query), _repeated(value[rows], query)
        scores, seed = _scores(query[rows], key[rows], scale, window_size), gradient[rows].float()
        shares = (scores - lse[:, rows, None]).exp()
        of_shares = torch.einsum("ihd,jhd->hij", seed, v)
        of_scores = shares * (of_shares - (seed * out[rows]).sum(-1).t()[..., None]) * scale
        parts = (
            torch.einsum("hij,jhd->ihd", of_scores, k),
            _summed(torch.einsum("hij,ihd->jhd", of_scores, q), key),
            _summed(torch.einsum("hij,ihd->jhd", shares, seed), value),
        )
        for tensor, part in zip(found, parts, strict=True):
            tensor[rows] = part.to(tensor.dtype)
    return found  # type: ignore[return-value]


def _datums(ends: Tensor) -> Iterator[slice]:
    return (slice(start, end) for start, end in pairwise(ends.tolist()))


def _scores(query: Tensor, key: Tensor, scale: float, window_size: Any) -> Tensor:
    """Each query's scores of the keys, fp32 [heads, n, n], -inf for those it does not see. `window_size`: how many keys
    before and after its own a query sees; -1 for all."""
    scores = torch.einsum("ihd,jhd->hij", query.float(), _repeated(key, query)) * scale
    behind = torch.arange(len(query))[:, None] - torch.arange(len(query))
    before, after = (len(query) if size < 0 else size for size in window_size)
    return scores.masked_fill((behind > before) | (behind < -after), float("-inf"))


def _repeated(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.float().repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def _summed(gradient: Tensor, tensor: Tensor) -> Tensor:
    return gradient.view(len(gradient), tensor.shape[1], -1, tensor.shape[2]).sum(2)
