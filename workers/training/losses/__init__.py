"""The losses: one pure file each, formulas as in the public Tinker documentation, sums over tokens.

To add one: a file here, a line in LOSS_FNS, and its inputs and settings in app/domain/losses.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from workers.training.losses.cispo import cispo
from workers.training.losses.cross_entropy import cross_entropy
from workers.training.losses.dro import dro
from workers.training.losses.gspo import gspo
from workers.training.losses.importance_sampling import importance_sampling
from workers.training.losses.ppo import ppo
from workers.training.losses.ppo_critic import ppo_critic
from workers.training.losses.value import LossFn, LossValue

LOSS_FNS: Mapping[str, LossFn] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
    "ppo_critic": ppo_critic,
}

__all__ = ["LOSS_FNS", "LossFn", "LossValue"]
