"""The losses by name, with the inputs and settings of each. The formulas are in workers/backends/training/losses/."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CLIP_LOW, CLIP_HIGH = "clip_low_threshold", "clip_high_threshold"
"""Bounds of the probability ratio: settings for all tokens, or inputs [N], which override the settings."""

ENTROPY = "entropy"
"""A setting of every loss. A value other than 0 requests the metric `entropy:sum`, which costs a pass over the
logits."""


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The specification of a loss. `inputs` are required per-token inputs, `optional` are optional ones; `config` holds
    the settings with their defaults.

    `wide` losses also take [N, K] targets. A `critic` loss uses values instead of logprobs: it has no targets, and a
    forward may leave out any of its inputs, which then count as 0.
    """

    inputs: tuple[str, ...]
    optional: tuple[str, ...] = ()
    config: Mapping[str, float] = field(default_factory=dict)
    wide: bool = False
    critic: bool = False


CUSTOM = "custom"
"""A loss that the client defines: the Op holds its graph, which names its further inputs."""

VALUE_CLIP = "value_clip"
"""The distance that a critic's value may move from the old value; beyond it the loss gains nothing."""

_ENTROPY = {ENTROPY: 0.0}
_POLICY = ("target_tokens", "logprobs", "advantages")
_PER_TOKEN = (CLIP_LOW, CLIP_HIGH)
_CLIP = {CLIP_LOW: 0.8, CLIP_HIGH: 1.2, **_ENTROPY}
# A geometric mean over a sequence stays far closer to 1 than a token's ratio, so 0.8..1.2 would never clip it. The
# paper's own range is 3e-4 below 1 and 4e-4 above (arXiv 2507.18071 v2, section 5.1); TRL's docs give the same range.
_SEQUENCE_CLIP = {CLIP_LOW: 0.9997, CLIP_HIGH: 1.0004, **_ENTROPY}

LOSSES: Mapping[str, LossSpec] = {
    "cross_entropy": LossSpec(("target_tokens",), ("weights",), config=_ENTROPY, wide=True),
    "importance_sampling": LossSpec(_POLICY, config=_ENTROPY),
    "ppo": LossSpec(_POLICY, _PER_TOKEN, config=_CLIP),
    "cispo": LossSpec(_POLICY, _PER_TOKEN, config=_CLIP),
    "dro": LossSpec(_POLICY, config={"beta": 0.05, **_ENTROPY}),
    "gspo": LossSpec((*_POLICY, "sequence_ratio_mask"), _PER_TOKEN, config=_SEQUENCE_CLIP),
    "ppo_critic": LossSpec(("values", "returns", "weights"), config={VALUE_CLIP: 0.2}, critic=True),
    CUSTOM: LossSpec(("target_tokens",), wide=True),
}


def losses_of(critic: bool) -> str:
    """The names of the losses of a critic, or of a policy, as text."""
    return ", ".join(name for name, spec in LOSSES.items() if spec.critic == critic)


NOT_OFFERED: Mapping[str, str] = {
    "stable_reinforce": (
        "its formula is proprietary: neither the SDK nor its documentation contains it, and it reads records that only "
        "the hosted service's sampler makes; for data from an older policy use importance_sampling, cispo or gspo"
    )
}
"""Losses of the SDK that this server does not offer, each with the reason and an alternative."""
