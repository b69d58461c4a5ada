"""-sum min(r A, clip(r) A), r = exp(lp - q); the clip thresholds are bounds of r itself (0.8, 1.2), not offsets.

Schulman et al. 2017, arXiv 1707.06347, equation 7.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workers.training.losses.policy import clip, log_ratio, policy_value
from workers.training.losses.value import LossValue


def ppo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossValue:
    ratio, advantages = log_ratio(logprobs, inputs).exp(), inputs["advantages"]
    held = clip(ratio, inputs, config)
    objective = torch.minimum(ratio * advantages, held * advantages)
    return policy_value(-objective, logprobs, inputs, ratio, held)
