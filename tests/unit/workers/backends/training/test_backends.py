"""Device choice of a rank, and its share of that device. There is no GPU here: stand-ins replace torch's calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.errors import SetupError
from app.settings import BaseModelSettings, TrainerSettings
from tests.parity import architectures
from workers.backends.training import backends
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


@pytest.mark.parametrize("devices", [(), (7, 3)])
def test_a_rank_has_the_gpu_of_its_number_among_those_it_sees_as_deepspeed_does(
    devices: tuple[int, ...], limits: list[tuple[float, torch.device]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rank_device(TrainerSettings(devices=devices)) == torch.device("cuda", 1)


def test_a_rank_without_a_gpu_is_a_setup_error(
    limits: list[tuple[float, torch.device]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(SetupError, match=r"rank 2 has no GPU: trainer\.devices is \[7, 3, 9\], but torch sees 2 here"):
        rank_device(TrainerSettings(devices=(7, 3, 9)))
    with pytest.raises(SetupError, match=r"rank 2 has no GPU: torch sees 2 here"):
        rank_device(TrainerSettings())


def test_a_rank_on_a_cpu_has_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", None)
    assert rank_device(TrainerSettings(memory_share=0.3)) == torch.device("cpu")


def test_deepspeed_computes_in_fp32_what_transformers_keeps_in_it(tmp_path: Path) -> None:
    """Inkling's convolutions, for example. Its sampler does the same."""
    base, found = architectures.build("inkling", tmp_path), []
    for trainer in ({"backend": "torch"}, {"backend": "deepspeed", "zero_stage": 1}):
        backend = backends.create(BaseModelSettings(name="t", path=str(base), dtype="bfloat16", trainer=trainer))
        backend.open()
        found.append(
            {name: (one.dtype, one.sum().item()) for name, one in backend._engine.base.model.named_parameters()}
        )
    assert found[0] == found[1]
    assert {dtype for dtype, _ in found[1].values()} == {torch.float32, torch.bfloat16}
