"""Device choice of a rank, and its share of that device. There is no GPU here: stand-ins replace torch's calls."""

from __future__ import annotations

import pytest
import torch

from app.settings import TrainerSettings
from workers.backends.training.backends import rank_device


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, torch.device]]:
    """Limits that torch received, on a machine that seems to have two GPUs."""
    fractions: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *args: fractions.append(args))
    return fractions


def test_a_rank_takes_no_more_of_its_gpu_than_its_share(
    limits: list[tuple[float, torch.device]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    device = rank_device(TrainerSettings(devices=(0, 1), memory_share=0.3))
    assert (device, limits) == (torch.device("cuda", 1), [(0.3, torch.device("cuda", 1))])


def test_a_rank_on_a_cpu_has_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", None)
    assert rank_device(TrainerSettings(memory_share=0.3)) == torch.device("cpu")
