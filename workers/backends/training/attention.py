"""Causal attention over datums that lie end to end in one row. No datum sees another: no padding, and no mask to build.

transformers calls it in place of its own attention (`NAME` is registered with it). `runs` reaches it as a keyword
argument of the model's forward. transformers makes no mask for a name that it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "tinsmith_packed"

Run = tuple[int, int]
"""(number of datums, tokens of each): adjacent datums of the same length share one attention call."""

# In bf16 torch's CPU kernel takes 1.7 (512 tokens) to 6 times (64) as long as the plain formula, forward and backward.
# Beyond this length the [tokens, tokens] scores that the formula keeps cost more.
_PLAIN_UP_TO = 512


def runs_of(lengths: Sequence[int]) -> list[Run]:
    """Returns the runs for datums of these token counts."""
    return [(len([*group]), length) for length, group in groupby(lengths)]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    runs: Sequence[Run],
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Maps query [1, heads, T, D], key and value [1, kv heads, T, D] to [1, T, heads, D]; the runs add up to T."""
    cut = zip(*(_cut(tensor[0], runs) for tensor in (query, key, value)), strict=True)
    parts = [_attend(q, k, v, scaling, sliding_window, softcap).transpose(1, 2).flatten(0, 1) for q, k, v in cut]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


AttentionInterface.register(NAME, packed_attention)


def _cut(tensor: Tensor, runs: Sequence[Run]) -> Iterator[Tensor]:
    """Yields views of [heads, T, D]: [datums, heads, length, D] for each run."""
    parts = torch.split(tensor, [count * length for count, length in runs], dim=1)
    for part, (count, length) in zip(parts, runs, strict=True):
        yield part.view(len(part), count, length, -1).transpose(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, softcap: float | None) -> Tensor:
    """Returns attention [datums, heads, length, D]."""
    length = q.shape[2]
    windowed = window is not None and window < length
    fast_plain = q.device.type == "cpu" and q.dtype is torch.bfloat16 and length <= _PLAIN_UP_TO
    if softcap is not None or fast_plain:
        return _plain(q, k, v, scaling, window if windowed else None, softcap)
    mask = _visible(length, window, q.device) if windowed else None
    return nn.functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )


def _plain(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, softcap: float | None) -> Tensor:
    """Computes softmax(q kᵀ · scaling) v. The query heads that share a key head are further rows of one product."""
    count, heads, length, width = q.shape
    kv_heads = k.shape[1]
    rows = q.reshape(count * kv_heads, heads // kv_heads * length, width)
    keys, values = (tensor.reshape(count * kv_heads, length, width) for tensor in (k, v))
    hidden = torch.zeros(length, length, dtype=q.dtype, device=q.device)
    hidden.masked_fill_(~_visible(length, window, q.device), float("-inf"))
    bias = hidden.repeat(heads // kv_heads, 1)
    if softcap is None:
        scores = torch.baddbmm(bias, rows, keys.transpose(1, 2), alpha=scaling)
    else:
        scores = torch.tanh(torch.bmm(rows, keys.transpose(1, 2)) * (scaling / softcap)) * softcap + bias
    return torch.bmm(torch.softmax(scores, -1), values).view(count, heads, length, width)


def _visible(length: int, window: int | None, device: torch.device) -> Tensor:
    """Returns bool [length, length]: True where row i sees column j, that is j <= i and i - j < window."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    return seen if window is None else seen.triu_(1 - window)
