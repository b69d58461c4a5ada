"""-sum r A, r = exp(lp - q): the policy gradient corrected for tokens sampled under another policy."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from workers.training.losses.policy import log_ratio, policy_value
from workers.training.losses.value import LossValue


def importance_sampling(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossValue:
    ratio = log_ratio(logprobs, inputs).exp()
    return policy_value(-ratio * inputs["advantages"], logprobs, inputs, ratio)
