"""-sum (lp A - beta/2 (lp - q)²): a policy gradient with a quadratic pull back to the policy that sampled.

The pull is on every token, those without an advantage included. Direct Reward Optimisation, arXiv 2405.19107.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from workers.training.losses.policy import log_ratio, policy_value
from workers.training.losses.value import LossValue


def dro(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossValue:
    log_r = log_ratio(logprobs, inputs)
    pull = 0.5 * config["beta"] * log_r.square()
    return policy_value(pull - logprobs * inputs["advantages"], logprobs, inputs, log_r.exp())
