"""The formulas of the losses: cross-entropy, a critic's loss on returns, and the policy losses.

The critic's loss is ½ Σ w max((v - R)², (clip(v) - R)²), with v the critic's values and clip(v) clipped to
v_old ± value_clip. It is the value loss of PPO's implementations: S. Huang et al., "The 37 Implementation Details of
Proximal Policy Optimization", 2022, detail 9, from which the half comes too; OpenRLHF and SkyRL have the same. The sum
is not divided by the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from app.domain.losses import CLIP_HIGH, CLIP_LOW, VALUE_CLIP


@dataclass(frozen=True, slots=True)
class LossValue:
    """The result of a loss.

    `per_token`: fp32 [n, L, K], the shape of the scores; a datum's loss is its sum, never a mean.

    `own`: bool [n, L, 1], the tokens that the loss covers (those with a weight or an advantage); None for all.

    `metrics`: per-token tensors of the scores' shape, keyed `name:reduction`, the reduction `sum`, `max` or `min`,
    over every token of a request. Where a token is not the loss's own, padding included, the value must change nothing.
    """

    per_token: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    own: Tensor | None = None


LossFn = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], LossValue]
"""(scores [n, L, K], the datums' inputs in that shape without the targets, the loss's settings) -> LossValue; all fp32.

Scores are the logprobs of the targets, or a critic's values with K = 1.

Padding holds 0 in every input, so a formula must stay finite on it.
"""


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


def log_ratio(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Returns log r = lp - q, with q the logprob under which the token was sampled."""
    return logprobs - inputs["logprobs"]


def clip(ratio: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """Clips r to [clip_low_threshold, clip_high_threshold]: the token's where they are inputs, else the settings'."""
    low, high = (inputs.get(name, config[name]) for name in (CLIP_LOW, CLIP_HIGH))
    return ratio.clamp(min=low).clamp(max=high)


def policy_value(
    per_token: Tensor, logprobs: Tensor, inputs: Mapping[str, Tensor], ratio: Tensor, clipped: Tensor | None = None
) -> LossValue:
    """Returns the loss with its metrics. `ratio` weighs the advantages; `clipped` is the ratio after clipping.

    All metrics are over the tokens with an advantage, since a prompt's q is a placeholder: `ratio:sum`, `:max` (0 where
    there is no such token) and `:min` (infinite there); `clipped:sum`, the number of ratios that clipping changed;
    `kl:sum`, the sum of q - lp, which estimates KL(sampled policy || trained model) without bias (k1 in J. Schulman,
    "Approximating KL Divergence", 2020) and may be negative.
    """
    own = inputs["advantages"] != 0
    ratio, log_r = ratio.detach(), log_ratio(logprobs.detach(), inputs)
    metrics = {
        "ratio:sum": torch.where(own, ratio, 0.0),
        "ratio:max": torch.where(own, ratio, 0.0),
        "ratio:min": torch.where(own, ratio, torch.inf),
        "kl:sum": torch.where(own, -log_r, 0.0),
    }
    if clipped is not None:
        metrics["clipped:sum"] = ((clipped.detach() != ratio) & own).float()
    return LossValue(per_token, metrics, own)


def importance_sampling(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossValue:
    """-sum r A, r = exp(lp - q): the policy gradient corrected for tokens sampled under another policy."""
    ratio = log_ratio(logprobs, inputs).exp()
    return policy_value(-ratio * inputs["advantages"], logprobs, inputs, ratio)


def ppo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossValue:
    """-sum min(r A, clip(r) A), r = exp(lp - q); the clip thresholds are bounds of r itself (0.8, 1.2), not offsets.

    Schulman et al. 2017, arXiv 1707.06347, equation 7.
    """
    ratio, advantages = log_ratio(logprobs, inputs).exp(), inputs["advantages"]
    clipped = clip(ratio, inputs, config)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    return policy_value(-objective, logprobs, inputs, ratio, clipped)


def cispo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossValue:
    """-sum sg(clip(r)) lp A, r = exp(lp - q): the clipped ratio is a constant weight, so every token keeps a gradient.

    MiniMax-M1, arXiv 2506.13585; the sum is not divided by the number of tokens.
    """
    ratio = log_ratio(logprobs.detach(), inputs).exp()
    clipped = clip(ratio, inputs, config)
    return policy_value(-clipped * logprobs * inputs["advantages"], logprobs, inputs, ratio, clipped)


def gspo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossValue:
    """-sum min(s_t A, clip(s_t) A), s_t = sg(s) exp(lp - sg(lp)), s the geometric mean of a sequence's exp(lp - q).

    GSPO-token, arXiv 2507.18071, section 4.3: every token has the value of the sequence's one ratio and the gradient of
    its own logprob. The mean is over the tokens with a nonzero `sequence_ratio_mask`, whatever its sign or size, as in
    Tinker's documentation of the loss; the sum is over all tokens, and not divided by their number.
    """
    constant, advantages = logprobs.detach(), inputs["advantages"]
    marked = inputs["sequence_ratio_mask"] != 0
    total = torch.where(marked, log_ratio(constant, inputs), 0.0).sum((1, 2), keepdim=True)
    ratio = (total / marked.sum((1, 2), keepdim=True) + (logprobs - constant)).exp()
    clipped = clip(ratio, inputs, config)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    return policy_value(-objective, logprobs, inputs, ratio, clipped)


def dro(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossValue:
    """-sum (lp A - beta/2 (lp - q)²): a policy gradient with a quadratic pull back to the policy that sampled.

    The pull acts on every token, those without an advantage included. Direct Reward Optimisation, arXiv 2405.19107.
    """
    log_r = log_ratio(logprobs, inputs)
    pull = 0.5 * config["beta"] * log_r.square()
    return policy_value(pull - logprobs * inputs["advantages"], logprobs, inputs, log_r.exp())
