"""vLLM frees a GPU's memory while it sleeps, and draws the same sample when it wakes. Needs vLLM for CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from app.domain.sampling import SampleRequest
from app.settings import BaseModelSettings, SamplerSettings
from tests.models import tiny_qwen3
from workers.backends.sampling.vllm.backend import VllmSampler

_SHARE = 0.3
# One sample: two may run in one batch or in two, and bf16 rounds differently in another batch.
_REQUEST = SampleRequest(np.arange(40, dtype=np.int32), num_samples=1, max_tokens=12, seed=1, ignore_eos=True)


@pytest.fixture
def sampler(tmp_path: Path) -> Iterator[VllmSampler]:
    settings = SamplerSettings(backend="vllm", sleep=True, memory_share=_SHARE)
    sampler = VllmSampler(BaseModelSettings(name="tiny", path=str(tiny_qwen3(tmp_path)), sampler=settings))
    sampler.open()
    yield sampler
    sampler.close()


def used_share() -> float:
    free, total = torch.cuda.mem_get_info()
    return 1 - free / total


def drawn(sampler: VllmSampler) -> list[int]:
    (sequence,) = sampler.sample(None, _REQUEST).sequences
    return [int(token) for token in sequence.tokens]


def test_most_memory_of_a_sampler_that_sleeps_is_free_until_it_wakes(sampler: VllmSampler) -> None:
    expected, awake = drawn(sampler), used_share()
    for _ in range(2):
        sampler.sleep()
        assert awake - used_share() > _SHARE / 2
        sampler.wake()
        assert drawn(sampler) == expected
        assert used_share() == pytest.approx(awake, abs=_SHARE / 10)
