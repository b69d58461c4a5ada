"""vLLM on a base model in 4 bits, and on one published in FP8: its logprobs are those of transformers and PEFT on the
dequantised base."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from app.settings import BaseModelSettings
from tests import packed_checkpoints
from tests.conformance.samplers import BACKENDS, CONTEXT, PROMPTS, Reference, make_reference, one
from tests.models import tiny_qwen3
from workers.backends.sampling.backends import create
from workers.backends.sampling.base import SamplerBackend
from workers.models.full_weights import write_dequantized


@pytest.fixture(scope="module", autouse=True)
def in_fp32() -> Iterator[None]:
    """A CPU without bf16 instructions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "get_capabilities", dict)
        yield


@pytest.fixture(scope="module", params=["nf4", "published in FP8"])
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BaseModelSettings:
    folder = tiny_qwen3(tmp_path_factory.mktemp("base"))
    if request.param != "nf4":
        packed_checkpoints.fp8(folder)
    dtype = "nf4" if request.param == "nf4" else "float32"
    return BaseModelSettings(
        name="tiny", path=str(folder), dtype=dtype, max_context=CONTEXT, max_rank=8, sampler=BACKENDS["vllm"]
    )


@pytest.fixture(scope="module")
def reference(settings: BaseModelSettings, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder: Path = tmp_path_factory.mktemp("dequantised")
    write_dequantized(settings, "float32", folder)
    return make_reference(folder)


@pytest.fixture(scope="module")
def sampler(settings: BaseModelSettings, reference: Reference) -> Iterator[SamplerBackend]:
    backend = create(settings)
    assert backend.open().dtype == settings.dtype
    backend.load("one", reference.adapters["one"])
    yield backend
    backend.close()


@pytest.mark.parametrize("adapter", [None, "one"])
def test_logprobs_are_those_on_the_dequantised_base(
    sampler: SamplerBackend, reference: Reference, settings: BaseModelSettings, adapter: str | None
) -> None:
    sequence = one(sampler, adapter, PROMPTS[1], temperature=0.0)
    tokens = np.concatenate([PROMPTS[1], sequence.tokens])
    np.testing.assert_allclose(sequence.logprobs, reference.logprobs(adapter, tokens)[-12:], atol=1e-3)
    if settings.quantized:
        plain = Reference(Path(settings.path), reference.adapters).logprobs(adapter, tokens)[-12:]
        assert np.abs(sequence.logprobs - plain).max() > 0.1
