"""LongRoPE (Phi-3): a datum has the same logprobs whatever is beside it, and a sampler has them too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from app.settings import BaseModelSettings, SamplerSettings
from tests.conformance.samplers import BACKENDS
from tests.models import byte_tokenizer
from tests.parity import architectures
from tests.parity.test_sampled_architectures import SPEC, compare, forward, sampled
from workers.backends.sampling.backends import create
from workers.backends.training import backends
from workers.backends.training.base import Create
from workers.backends.training.trainer import Trainer

ORIGINAL = 16
_FACTORS = 16  # half of a head of 32, the least that vLLM's CPU attention takes
_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(_FACTORS)],
    "long_factor": [2.0 + 0.5 * i for i in range(_FACTORS)],
    "original_max_position_embeddings": ORIGINAL,
}
SHORT, LONG = (np.random.default_rng(n).integers(0, 256, n).astype(np.int32) for n in (ORIGINAL, 60))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"head_dim": 32, "hidden_size": 128, "rope_parameters": _ROPE, "original_max_position_embeddings": ORIGINAL}
    folder = architectures.build("phi3", tmp_path_factory.mktemp("base"), **shape)
    byte_tokenizer().save_pretrained(folder)
    return folder


def settings(base: Path, max_context: int, sampler: SamplerSettings | None = None) -> BaseModelSettings:
    trainer = {"backend": "torch", "micro_batch_tokens": 256}
    return BaseModelSettings(
        name="tiny",
        path=str(base),
        dtype="float32",
        max_context=max_context,
        trainer=trainer,
        **({} if sampler is None else {"sampler": sampler}),
    )


def opened(base: Path, max_context: int = 0) -> Trainer:
    torch.set_num_threads(1)
    trainer = backends.create(settings(base, max_context))
    trainer.open()
    trainer.apply({"m": Create(SPEC)})  # a new adapter adds nothing
    return trainer


def of_transformers(base: Path, tokens: np.ndarray) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    row = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        logprobs = model(row[None]).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, row[1:, None])[:, 0].numpy()


def test_a_datum_has_the_same_logprobs_beside_a_longer_one(base: Path) -> None:
    trainer = opened(base)
    (alone,) = forward(trainer, "m", [SHORT])
    beside, long = forward(trainer, "m", [SHORT, LONG])
    np.testing.assert_allclose(beside, alone, atol=1e-5)
    np.testing.assert_allclose(long, of_transformers(base, LONG), atol=1e-5)
    assert abs(alone - of_transformers(base, SHORT)).max() > 1e-2, "long frequencies for all, as in vLLM"


def test_a_context_of_the_original_length_has_the_short_frequencies(base: Path) -> None:
    (found,) = forward(opened(base, max_context=ORIGINAL), "m", [SHORT])
    np.testing.assert_allclose(found, of_transformers(base, SHORT), atol=1e-5)


@pytest.mark.parametrize("context", [256, ORIGINAL])
def test_a_family_that_scales_by_the_length_of_a_call_takes_the_scale_of_the_context(
    context: int, tmp_path: Path
) -> None:
    def built(name: str, **rope: Any) -> Path:
        shape = {"head_dim": 32, "hidden_size": 128, "rope_parameters": {**_ROPE, **rope}}
        return architectures.build("phimoe", tmp_path / name, **shape)

    base = built("base", short_mscale=1.1, long_mscale=1.5)
    (alone,) = forward(trainer := opened(base, context), "m", [SHORT])
    beside, _ = forward(trainer, "m", [SHORT, LONG[:context]])
    np.testing.assert_allclose(beside, alone, atol=1e-5)
    # transformers takes the short factors in every call.
    factors = _ROPE["short_factor" if context == ORIGINAL else "long_factor"]
    scale = 1.1 if context == ORIGINAL else 1.5
    wanted = built("wanted", short_factor=factors, short_mscale=scale, long_mscale=scale)
    np.testing.assert_allclose(alone, of_transformers(wanted, SHORT), atol=1e-5)


@pytest.mark.parametrize("backend", ["transformers", "vllm"])
def test_a_sampler_has_the_trainers_logprobs(base: Path, backend: str) -> None:
    sampler = create(settings(base, 256, BACKENDS[backend]))
    sampler.open()
    try:
        found = sampled(sampler, None)
    finally:
        sampler.close()
    compare(found, opened(base, max_context=256), "m", atol=1e-3)
