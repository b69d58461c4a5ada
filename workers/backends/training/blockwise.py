"""Attention that needs a score for each query and key (a sliding window, a cap), in memory that grows with the datum.

Autograd keeps query, key and value; the backward pass computes the scores again. Beyond `_WHOLE_UP_TO` tokens the
queries are also cut into blocks, so that no [tokens, tokens] tensor exists at all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

KEPT_UP_TO = 512
"""Tokens of a datum up to which scores are kept: there they are smaller than a layer's other activations."""
_WHOLE_UP_TO = 4096
# Scores computed at once: 16 MB in fp32. A block needs some six tensors of this size.
_SCORES = 2**22
_LEAST_ROWS, _MOST_ROWS = 64, 512
_recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps query [N, heads, rows, D], key and value [N, kv heads, columns, D] to [N, heads, rows, D]. The last row is the
token of the last column."""


def attend(attention: Attend, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Returns `attention` of datums [N, heads, length, D]. A query sees `window` keys, itself the last of them; None:
    all keys up to itself."""
    count, heads, length, _ = q.shape
    seen = length if window is None else min(window, length)
    rows = length
    if length > _WHOLE_UP_TO:
        rows = min(max(_SCORES // (count * heads * seen), _LEAST_ROWS), _MOST_ROWS)
    parts = []
    for start in range(0, length, rows):
        end, first = min(start + rows, length), max(0, start + 1 - seen)
        keys, values = k[:, :, first:end], v[:, :, first:end]
        parts.append(_recomputed(attention, q[:, :, start:end], keys, values))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
