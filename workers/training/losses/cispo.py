"""-sum sg(clip(r)) lp A, r = exp(lp - q): the clipped ratio is a constant weight, so every token keeps a gradient.

MiniMax-M1, arXiv 2506.13585; the sum is not divided by the number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from workers.training.losses.policy import clip, log_ratio, policy_value
from workers.training.losses.value import LossValue


def cispo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossValue:
    ratio = log_ratio(logprobs.detach(), inputs).exp()
    held = clip(ratio, inputs, config)
    return policy_value(-held * logprobs * inputs["advantages"], logprobs, inputs, ratio, held)
