"""-sum sg(clip(r)) lp A, r = exp(lp - q): the clipped ratio is a constant weight, so every token keeps a gradient."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from workers.training.losses.policy import clipped, drift, log_ratio
from workers.training.losses.value import LossValue


def cispo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossValue:
    held, was_clipped = clipped(log_ratio(logprobs.detach(), inputs).exp(), inputs, config)
    per_token = -held * logprobs * inputs["advantages"]
    return LossValue(per_token, {**drift(logprobs, inputs), "clipped:sum": was_clipped})
