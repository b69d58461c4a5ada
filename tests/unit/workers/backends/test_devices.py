"""A worker uses its machine's GPUs or says why not, and reports those of its ranks by the numbers they are bound to.

Stand-ins take the place of GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Some
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from app.errors import SetupError
from app.settings import BaseModelSettings, TrainerSettings
from workers.backends import devices
from workers.backends.sampling.backends import create
from workers.backends.sampling.transformers.backend import TransformersSampler
from workers.backends.sampling.vllm.backend import VllmSampler
from workers.backends.training.backends import rank_device

SETTINGS = BaseModelSettings(name="base", path="/m", sampler={"engine_args": {"pipeline_parallel_size": 3}})


def vllm_sampler(kind: str) -> Any:
    """On three ranks."""
    sampler: Any = VllmSampler(SETTINGS)
    config = Some(device_config=Some(device_type=kind), parallel_config=Some(tensor_parallel_size=1))
    sampler._engine, sampler._weights = Some(engine=Some(vllm_config=config)), Some(ids=list)
    sampler._model_info = Some(dtype="bfloat16")
    return sampler


def transformers_sampler(kind: str) -> Any:
    sampler: Any = TransformersSampler(SETTINGS)
    sampler._base, sampler._weights = Some(device=torch.device(kind), info=Some(dtype="bfloat16")), Some(ids=list)
    return sampler


@pytest.mark.parametrize(
    ("bound", "named"),
    [("7, 3,9,1", ["cuda:7", "cuda:3", "cuda:9"]), ("", ["cuda:0", "cuda:1", "cuda:2"])],
    ids=["bound", "not bound"],
)
def test_a_gpu_has_the_number_that_it_is_bound_to_or_else_its_place(
    bound: str, named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", bound)
    assert devices.names("cuda", 3) == vllm_sampler("cuda").describe()["devices"] == named
    assert transformers_sampler("cuda").describe()["devices"] == named[:1]


def test_every_rank_on_a_cpu_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert devices.names("cpu", 3) == vllm_sampler("cpu").describe()["devices"] == ["cpu"] * 3
    assert transformers_sampler("cpu").describe()["devices"] == ["cpu"]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a driver with one GPU, beside a CUDA build of torch that cannot use it."""

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\nUpdate it.")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "0000:00:00.0").mkdir()
    return tmp_path


def test_a_driver_that_torch_cannot_use_is_a_setup_error_with_the_reason(driver: Path) -> None:
    with pytest.raises(
        SetupError, match=r"GPUs: The NVIDIA driver .* too old \(found version 12040\)\. Update the NVID"
    ):
        devices.check_gpus(driver)


def test_a_cpu_is_used_where_no_gpu_is_there_or_none_is_wanted(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.check_gpus(driver / "0000:00:00.0")
    for none in ("", "-1", "-1,2", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        devices.check_gpus(driver)
    for some in ("0", "2,-1", "GPU-1a", "MIG-2b"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", some)
        with pytest.raises(SetupError):
            devices.check_gpus(driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.version, "cuda", None)
    devices.check_gpus(driver)


@pytest.mark.parametrize("start", [lambda: rank_device(TrainerSettings()), lambda: create(SETTINGS)])
def test_trainers_and_samplers_check_the_gpus_first(
    start: Callable[[], object], driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices.check_gpus, "__defaults__", (driver,))
    with pytest.raises(SetupError, match="too old"):
        start()


class OnGpu(torch.Tensor):
    """Stands in for a tensor on a GPU that has no memory left for a cast, nor its host for pinned copies."""

    is_cpu = False

    @classmethod
    def of(cls, tensor: torch.Tensor, *, casts: bool, pins: bool) -> OnGpu:
        found = tensor.as_subclass(cls)
        found.casts, found.pins = casts, pins
        return found

    def detach(self) -> OnGpu:
        return self

    def to(self, *target: Any, non_blocking: bool = False, **options: Any) -> torch.Tensor:
        if target[0] not in ("cpu", self.dtype) and not self.casts:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if non_blocking and not self.pins:
            raise torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'")
        found = self.as_subclass(torch.Tensor).to(*target, **options)
        return found if target[0] == "cpu" else OnGpu.of(found, casts=self.casts, pins=self.pins)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("casts", "pins"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_copy_needs_no_memory_but_its_own_and_has_the_same_bits(casts: bool, pins: bool, dtype: torch.dtype) -> None:
    """A save would else break a trainer whose GPU is full."""
    weights = torch.randn(100)
    found = devices.copied({"w": OnGpu.of(weights, casts=casts, pins=pins)}, pinned=True, dtype=dtype)["w"]
    assert type(found) is torch.Tensor and found.dtype == dtype
    assert torch.equal(found, weights.to(dtype)) and found.data_ptr() != weights.data_ptr()


def test_a_copy_that_fails_for_another_reason_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: Any, **__: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(OnGpu, "to", Mock(side_effect=lose))
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        devices.copied({"w": OnGpu.of(torch.randn(3), casts=True, pins=True)})
    assert OnGpu.to.call_count == 1  # type: ignore[attr-defined]
