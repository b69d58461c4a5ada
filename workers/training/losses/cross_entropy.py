"""-sum w lp; any real weight, 1 where none is given; with [N, K] targets each of the K has its own weight."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from workers.training.losses.value import LossValue


def cross_entropy(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossValue:
    weights = inputs.get("weights")
    if weights is None:
        return LossValue(-logprobs)
    return LossValue(-weights * logprobs, own=(weights != 0).any(-1, keepdim=True))
