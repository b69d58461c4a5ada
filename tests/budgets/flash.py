"""torch's attention over datums of any lengths, which has kernels for GPUs alone, by its documentation and on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def forward(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Maps query [T, heads, D], key and value [T, kv heads, D] to [T, heads, D].

    The logarithms of the softmax's sums, which a GPU keeps for the backward pass, are not computed here.
    """
    scale, window_size = others[4:6]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for rows in _datums(ends):
        shares, values = _shares(query[rows], key[rows], scale, window_size), _repeated(value[rows], query)
        out[rows] = torch.einsum("hij,jhd->ihd", shares, values).to(query.dtype)
    return out, query.new_empty(query.shape[1::-1], dtype=torch.float32), torch.empty(0)


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, _: Tensor, ends: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value."""
    scale, window_size = others[-2:]
    found = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
    for rows in _datums(ends):
        q, k, v = query[rows].float(), _repeated(key[rows], query), _repeated(value[rows], query)
        shares, seed = _shares(query[rows], key[rows], scale, window_size), gradient[rows].float()
        of_shares = torch.einsum("ihd,jhd->hij", seed, v)
        of_scores = shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True)) * scale
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


def _shares(query: Tensor, key: Tensor, scale: float, window_size: Any) -> Tensor:
    """Each query's shares of the keys, fp32 [heads, n, n]. `window_size`: how many keys before and after its own a
    query sees; -1 for all."""
    scores = torch.einsum("ihd,jhd->hij", query.float(), _repeated(key, query)) * scale
    behind = torch.arange(len(query))[:, None] - torch.arange(len(query))
    before, after = (len(query) if size < 0 else size for size in window_size)
    return scores.masked_fill((behind > before) | (behind < -after), float("-inf")).softmax(-1)


def _repeated(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.float().repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def _summed(gradient: Tensor, tensor: Tensor) -> Tensor:
    return gradient.view(len(gradient), tensor.shape[1], -1, tensor.shape[2]).sum(2)
