"""Every architecture that the transformers sampler takes: its logprobs against those of the trainer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from app.domain.ops import AdamParams, Batch, ForwardBackward, LoraSpec, OptimStep, Ragged
from app.domain.sampling import SampleRequest
from app.settings import BaseModelSettings, SamplerSettings
from tests.models import byte_tokenizer
from tests.parity import architectures
from tests.parity.datums import batch, supervised
from tests.parity.training import open_trainer, run
from workers.backends.sampling.backends import create
from workers.backends.sampling.base import SamplerBackend
from workers.backends.training.base import Create
from workers.backends.training.trainer import Trainer

PROMPTS = [np.random.default_rng(n).integers(0, 256, n).astype(np.int32) for n in (1, 9, 150)]
SPEC = LoraSpec(rank=4, seed=1)


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


def check(sampler: SamplerBackend, trainer: Trainer, atol: float) -> None:
    """The sampler's logprobs of prompts and samples under "m" are the trainer's. Closes the sampler."""
    found = sampled(sampler, "m")
    sampler.close()
    compare(found, trainer, "m", atol)


def sampled(sampler: SamplerBackend, adapter: str | None) -> list[tuple[np.ndarray, np.ndarray]]:
    """Sequences of prompts with their samples: tokens [N], and the sampler's logprobs [N - 1] of all but the first."""
    with ThreadPoolExecutor() as threads:  # one batch of mixed lengths, whose rows end one after another
        requests = [
            SampleRequest(prompt, 2, limit, seed=1, ignore_eos=True, prompt_logprobs=True)
            for prompt, limit in zip(PROMPTS, (4, 12, 20), strict=True)
        ]
        outputs = list(threads.map(lambda request: sampler.sample(adapter, request), requests))
    return [
        (np.concatenate([prompt, sample.tokens]), np.concatenate([output.prompt_logprobs[1:], sample.logprobs]))
        for prompt, output in zip(PROMPTS, outputs, strict=True)
        for sample in output.sequences
    ]


def compare(found: list[tuple[np.ndarray, np.ndarray]], trainer: Trainer, model: str, atol: float) -> None:
    """The logprobs that `sampled` found are those of the trainer's `model`."""
    wanted = forward(trainer, model, [tokens for tokens, _ in found])
    for (_, logprobs), own in zip(found, wanted, strict=True):
        np.testing.assert_allclose(logprobs, own, atol=atol)


def trained(base: Path, folder: Path, spec: LoraSpec = SPEC) -> Trainer:
    """A trainer with a model "m" whose adapter changes the logprobs, and is saved in `folder`."""
    trainer = open_trainer(base)
    trainer.apply({"m": Create(spec)})
    trainer.apply({"m": ForwardBackward(batch(supervised(0, (23, 7))), "cross_entropy")})
    trainer.apply({"m": OptimStep(AdamParams(learning_rate=1e-2, eps=1e-8))})
    folder.mkdir()
    trainer.capture("m", optimizer=False)(folder)
    return trainer


def forward(trainer: Trainer, model: str, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """The trainer's logprob of every token but the first."""
    tokens = Ragged.of([sequence[:-1] for sequence in sequences], np.int32)
    targets = Ragged.of([sequence[1:] for sequence in sequences], np.int64)
    op = ForwardBackward(Batch(tokens, {"target_tokens": targets}), "cross_entropy", forward_only=True)
    return list(run(trainer, model, op).logprobs)
