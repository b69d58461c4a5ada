"""What the policy losses share: the ratio to the policy that sampled, its clipping, how far the two have drifted."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from app.domain.losses import CLIP_HIGH, CLIP_LOW
from workers.training.losses.value import LossValue


def log_ratio(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """log r = lp - q, with q the logprob under which the token was sampled."""
    return logprobs - inputs["logprobs"]


def clip(ratio: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """r held to [clip_low_threshold, clip_high_threshold], of the token where it is an input, else of the settings."""
    low, high = (inputs.get(name, config[name]) for name in (CLIP_LOW, CLIP_HIGH))
    return ratio.clamp(min=low).clamp(max=high)


def policy_value(
    per_token: Tensor, logprobs: Tensor, inputs: Mapping[str, Tensor], ratio: Tensor, held: Tensor | None = None
) -> LossValue:
    """The loss with its metrics. `ratio` is the one it weighs advantages with, `held` the same after clipping.

    All are over the tokens with an advantage, since a prompt's q is a placeholder: `ratio:sum`, `:max` (0 where there
    is no such token) and `:min` (infinite there); `clipped:sum`, how many ratios clipping changed; `kl:sum`, the sum of
    q - lp, which estimates KL(sampled policy || trained model) without bias (k1 in J. Schulman, "Approximating KL
    Divergence", 2020) and may be negative.
    """
    own = inputs["advantages"] != 0
    ratio, log_r = ratio.detach(), log_ratio(logprobs.detach(), inputs)
    metrics = {
        "ratio:sum": torch.where(own, ratio, 0.0),
        "ratio:max": torch.where(own, ratio, 0.0),
        "ratio:min": torch.where(own, ratio, torch.inf),
        "kl:sum": torch.where(own, -log_r, 0.0),
    }
    if held is not None:
        metrics["clipped:sum"] = ((held.detach() != ratio) & own).float()
    return LossValue(per_token, metrics, own)
