"""What the policy losses share: the ratio to the policy that sampled, and how far the two have drifted apart."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def log_ratio(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """log r = lp - q, with q the logprob under which the token was sampled."""
    return logprobs - inputs["logprobs"]


def drift(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`ratio:max` and `kl:sum`, the plain estimate sum(q - lp) of KL(sampled policy || trained model).

    Only tokens with an advantage count: a prompt's q is a placeholder.
    """
    log_r = log_ratio(logprobs.detach(), inputs)
    counted = inputs["advantages"] != 0
    return {"ratio:max": torch.where(counted, log_r.exp(), 0.0), "kl:sum": torch.where(counted, -log_r, 0.0)}


def clipped(ratio: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """r held to [clip_low_threshold, clip_high_threshold], and 1.0 where that changed the r of a counted token."""
    held = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return held, ((held != ratio) & (inputs["advantages"] != 0)).float()
