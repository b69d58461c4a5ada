"""A worker's report names the GPUs of its ranks by the numbers they are bound to. Stand-ins take the place of GPUs."""

from __future__ import annotations

from types import SimpleNamespace as Some
from typing import Any

import pytest
import torch

from app.settings import BaseModelSettings
from workers.backends import devices
from workers.backends.sampling.transformers.backend import TransformersSampler
from workers.backends.sampling.vllm.backend import VllmSampler

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
