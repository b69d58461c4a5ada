"""Every architecture that the transformers sampler takes, and some in vLLM: logprobs against those of the trainer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from app.domain.ops import AdamParams, Batch, ForwardBackward, LoraSpec, OptimStep, Ragged
from app.domain.sampling import SampleRequest
from app.settings import BaseModelSettings, SamplerSettings
from tests.conformance.samplers import BACKENDS
from tests.models import byte_tokenizer
from tests.parity import architectures
from tests.parity.datums import batch, supervised
from tests.parity.training import open_trainer, run
from workers.backends.sampling.base import SamplerBackend, create
from workers.backends.training.base import Create
from workers.backends.training.trainer import Trainer

PROMPTS = [np.random.default_rng(n).integers(0, 256, n).astype(np.int32) for n in (1, 9, 150)]
# Each start of vLLM takes 20 s and more. docs/models.md says which families were tried by hand in the same way.
VLLM_CASES = ["olmo3"]


@pytest.mark.parametrize("case", architectures.CASES)
def test_sampled_and_prompt_logprobs_are_the_trainers_own(case: str, tmp_path: Path) -> None:
    base = architectures.build(case, tmp_path / "base")
    byte_tokenizer().save_pretrained(base)
    trainer = trained(base, tmp_path / "adapter")
    sampler = create(
        BaseModelSettings(name="tiny", path=str(base), dtype="float32", sampler=SamplerSettings(backend="transformers"))
    )
    sampler.open()
    sampler.load("m", tmp_path / "adapter")
    check(sampler, trainer, atol=1e-4)


@pytest.mark.parametrize("case", VLLM_CASES)
def test_vllm_has_the_trainers_logprobs_too(case: str, tmp_path: Path) -> None:
    base = architectures.build(case, tmp_path / "base", head_dim=32)  # vLLM's CPU attention refuses 16
    byte_tokenizer().save_pretrained(base)
    trainer = trained(base, tmp_path / "adapter")
    sampler = create(
        BaseModelSettings(
            name="tiny", path=str(base), dtype="float32", max_context=256, max_rank=8, sampler=BACKENDS["vllm"]
        )
    )
    sampler.open()
    sampler.load("m", tmp_path / "adapter")
    check(sampler, trainer, atol=1e-3)


def check(sampler: SamplerBackend, trainer: Trainer, atol: float) -> None:
    """The sampler's logprobs of prompts and samples under "m" are the trainer's. Closes the sampler."""
    with ThreadPoolExecutor() as threads:  # one batch of mixed lengths, whose rows end one after another
        requests = [
            SampleRequest(prompt, 2, limit, seed=1, ignore_eos=True, prompt_logprobs=True)
            for prompt, limit in zip(PROMPTS, (4, 12, 20), strict=True)
        ]
        outputs = list(threads.map(lambda request: sampler.sample("m", request), requests))
    sampler.close()
    sampled = [
        (np.concatenate([prompt, sample.tokens]), np.concatenate([output.prompt_logprobs[1:], sample.logprobs]))
        for prompt, output in zip(PROMPTS, outputs, strict=True)
        for sample in output.sequences
    ]
    for (_, found), wanted in zip(sampled, forward(trainer, [tokens for tokens, _ in sampled]), strict=True):
        np.testing.assert_allclose(found, wanted, atol=atol)


def trained(base: Path, folder: Path) -> Trainer:
    """A trainer with a model "m" whose adapter changes the logprobs, and is saved in `folder`."""
    trainer = open_trainer(base)
    trainer.apply({"m": Create(LoraSpec(rank=4, seed=1))})
    trainer.apply({"m": ForwardBackward(batch(supervised(0, (23, 7))), "cross_entropy")})
    trainer.apply({"m": OptimStep(AdamParams(learning_rate=1e-2, eps=1e-8))})
    folder.mkdir()
    trainer.capture("m", optimizer=False)(folder)
    return trainer


def forward(trainer: Trainer, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """The trainer's logprob of every token but the first."""
    tokens = Ragged.of([sequence[:-1] for sequence in sequences], np.int32)
    targets = Ragged.of([sequence[1:] for sequence in sequences], np.int64)
    op = ForwardBackward(Batch(tokens, {"target_tokens": targets}), "cross_entropy", forward_only=True)
    return list(run(trainer, "m", op).logprobs)
