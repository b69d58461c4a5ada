"""-sum (lp A - beta/2 (lp - q)²): a policy gradient with a quadratic pull back to the policy that sampled.

The pull is on every token, those without an advantage included.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from workers.training.losses.policy import drift, log_ratio
from workers.training.losses.value import LossValue


def dro(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossValue:
    pull = 0.5 * config["beta"] * log_ratio(logprobs, inputs).square()
    return LossValue(pull - logprobs * inputs["advantages"], drift(logprobs, inputs))
