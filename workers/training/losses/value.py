"""What every loss takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossValue:
    """`per_token`: fp32, the shape of the logprobs; a datum's loss is its sum, never a mean.

    `metrics`: per-token tensors of that shape keyed `name:reduction`, the reduction `sum` or `max`, over every token
    of a request. A value of 0 must mean "nothing here" for either reduction, since padding is set to 0.
    """

    per_token: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


LossFn = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], LossValue]
"""(logprobs of the targets, the datums' inputs in that shape, the loss's settings) -> LossValue; all fp32."""
