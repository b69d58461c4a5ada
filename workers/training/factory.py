"""Makes the backend the settings name; the heavy libraries are imported only here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.settings import BaseModelSettings

if TYPE_CHECKING:
    from workers.training.trainer import Trainer


def create(settings: BaseModelSettings, *, full: bool = False) -> Trainer:
    """A TrainingBackend, not yet opened. With several ranks, rank 0 uses it and the others `open` and `follow` it.

    `full`: its models train the base's own weights.

    A launcher (torchrun) sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; without one there is one rank.
    """
    if settings.trainer.backend == "torch":
        from workers.training.torch_backend import TorchBackend

        return TorchBackend(settings, full=full)
    from workers.training.deepspeed_backend import DeepSpeedBackend

    return DeepSpeedBackend(settings, full=full)
