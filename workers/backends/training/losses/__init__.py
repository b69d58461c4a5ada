"""The losses: one pure function each. Formulas follow the public Tinker documentation; sums are over tokens.

CONTRIBUTING.md says how to add a loss.
"""

from __future__ import annotations

from collections.abc import Mapping

from workers.backends.training.losses.formulas import (
    LossFn,
    cispo,
    cross_entropy,
    dro,
    gspo,
    importance_sampling,
    ppo,
    ppo_critic,
)

LOSS_FNS: Mapping[str, LossFn] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
    "ppo_critic": ppo_critic,
}

__all__ = ["LOSS_FNS", "LossFn"]
