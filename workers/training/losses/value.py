"""What every loss takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossValue:
    """`per_token`: fp32 [n, L, K], the shape of the scores; a datum's loss is its sum, never a mean.

    `own`: bool [n, L, 1], the tokens the loss is about (those with a weight or an advantage); None for all.

    `metrics`: per-token tensors of the scores' shape, keyed `name:reduction`, the reduction `sum`, `max` or `min`,
    over every token of a request. Where a token is not the loss's own, padding included, the value must change nothing.
    """

    per_token: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    own: Tensor | None = None


LossFn = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], LossValue]
"""(scores [n, L, K], the datums' inputs in that shape, the loss's settings) -> LossValue; all fp32.

Scores are the logprobs of the targets, or a critic's values with K = 1.

Padding holds 0 in every input, so a formula must stay finite on it.
"""
