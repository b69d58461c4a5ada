"""Which device this rank computes on."""

from __future__ import annotations

import os

import torch

from app.errors import SetupError
from app.settings import TrainerSettings


def rank_device(settings: TrainerSettings) -> torch.device:
    """The GPU named for LOCAL_RANK (the GPU of that number if none are named), or the CPU where there is no GPU.

    From then on torch takes no more of its memory than the settings' share. Raises SetupError when it does not exist.
    """
    if not torch.cuda.is_available():
        if settings.devices:
            raise SetupError(f"trainer.devices is {list(settings.devices)} but torch sees no GPU here")
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    devices = settings.devices or tuple(range(torch.cuda.device_count()))
    if local_rank >= len(devices) or devices[local_rank] >= torch.cuda.device_count():
        raise SetupError(
            f"rank {local_rank} has no GPU: trainer.devices is {list(devices)} and torch sees "
            f"{torch.cuda.device_count()}; lower trainer.ranks or correct the list"
        )
    device = torch.device("cuda", devices[local_rank])
    torch.cuda.set_device(device)
    torch.cuda.set_per_process_memory_fraction(settings.memory_share, device)
    return device
