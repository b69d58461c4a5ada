"""The losses by name: which inputs and settings each takes. The formulas live in workers/training/losses/."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LossSpec:
    """`inputs` must be there, per token; `optional` may be; `config` holds the settings with their defaults.

    `wide` losses also take [N, K] targets.
    """

    inputs: tuple[str, ...]
    optional: tuple[str, ...] = ()
    config: Mapping[str, float] = field(default_factory=dict)
    wide: bool = False


_POLICY = ("target_tokens", "logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

LOSSES: Mapping[str, LossSpec] = {
    "cross_entropy": LossSpec(("target_tokens",), ("weights",), wide=True),
    "importance_sampling": LossSpec(_POLICY),
    "ppo": LossSpec(_POLICY, config=_CLIP),
    "cispo": LossSpec(_POLICY, config=_CLIP),
    "dro": LossSpec(_POLICY, config={"beta": 0.05}),
}
