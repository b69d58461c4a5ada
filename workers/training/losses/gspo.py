"""-sum min(s_t A, clip(s_t) A), s_t = sg(s) exp(lp - sg(lp)), s the geometric mean of a sequence's ratios exp(lp - q).

GSPO-token, arXiv 2507.18071, section 4.3: every token has the value of the sequence's one ratio and the gradient
of its own logprob. The mean is over the tokens whose `sequence_ratio_mask` is not 0, whatever its sign or size, as in
Tinker's documentation of the loss; the sum is over all tokens, and not divided by their number.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workers.training.losses.policy import clip, log_ratio, policy_value
from workers.training.losses.value import LossValue


def gspo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossValue:
    constant, advantages = logprobs.detach(), inputs["advantages"]
    marked = inputs["sequence_ratio_mask"] != 0
    total = torch.where(marked, log_ratio(constant, inputs), 0.0).sum((1, 2), keepdim=True)
    ratio = (total / marked.sum((1, 2), keepdim=True) + (logprobs - constant)).exp()
    held = clip(ratio, inputs, config)
    objective = torch.minimum(ratio * advantages, held * advantages)
    return policy_value(-objective, logprobs, inputs, ratio, held)
