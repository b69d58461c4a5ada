"""The losses against given targets: cross-entropy of tokens, and a critic's loss on returns.

The critic's loss is ½ Σ w max((v - R)², (clip(v) - R)²), with v the critic's values and clip(v) clipped to
v_old ± value_clip.

It is the value loss of PPO's implementations: S. Huang et al., "The 37 Implementation Details of Proximal Policy
Optimization", 2022, detail 9, from which the half comes too; OpenRLHF and SkyRL have the same. The sum is not divided
by the number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from app.domain.losses import VALUE_CLIP
from workers.backends.training.losses.policy import LossValue


def cross_entropy(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossValue:
    """-sum w lp; any real weight, 1 where none is given; with [N, K] targets each of the K has its own weight."""
    weights = inputs.get("weights")
    if weights is None:
        return LossValue(-logprobs)
    return LossValue(-weights * logprobs, own=(weights != 0).any(-1, keepdim=True))


def ppo_critic(values: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossValue:
    """½ sum w max((v - R)², (clip(v) - R)²); see the module docstring.

    All metrics are over the tokens with a weight. With n of them, e = return:sum - value:sum and s =
    squared_error:sum, the explained variance 1 - Var(R - v) / Var(R) is
    1 - (s - e²/n) / (squared_return:sum - return:sum²/n).
    """
    left_out = torch.zeros_like(values)
    old, returns, weights = (inputs.get(name, left_out) for name in ("values", "returns", "weights"))
    clipped = values.clamp(old - config[VALUE_CLIP], old + config[VALUE_CLIP])
    squared_error = (values - returns).square()
    loss = 0.5 * weights * torch.maximum(squared_error, (clipped - returns).square())
    own, found = weights != 0, values.detach()
    metrics = {
        "value:sum": found,
        "return:sum": returns,
        "squared_return:sum": returns.square(),
        "squared_error:sum": squared_error.detach(),
        "error:max": (found - returns).abs(),
        "clipped:sum": (clipped.detach() != found).float(),
    }
    return LossValue(loss, {name: torch.where(own, tensor, 0.0) for name, tensor in metrics.items()}, own)
