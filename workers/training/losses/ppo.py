"""-sum min(r A, clip(r) A), r = exp(lp - q); the clip thresholds are bounds of r itself (0.8, 1.2), not offsets."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workers.training.losses.policy import clipped, drift, log_ratio
from workers.training.losses.value import LossValue


def ppo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossValue:
    ratio, advantages = log_ratio(logprobs, inputs).exp(), inputs["advantages"]
    held, was_clipped = clipped(ratio, inputs, config)
    objective = torch.minimum(ratio * advantages, held * advantages)
    return LossValue(-objective, {**drift(logprobs, inputs), "clipped:sum": was_clipped})
