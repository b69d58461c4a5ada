"""Logprobs of sampled tokens: the sampler's against those of the trainer that holds the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from app.domain.ops import Batch, ForwardBackward, LoraSpec, Ragged
from app.domain.sampling import SampleRequest
from app.settings import BaseModelSettings, SamplerSettings
from tests.parity.training import run
from workers.backends.sampling.backends import create as create_sampler
from workers.backends.sampling.base import SamplerBackend
from workers.backends.training.trainer import Trainer

# Prompts of mixed lengths, and every sampling parameter: in each case the logprobs are the model's own.
SHAPES = [{}, {"temperature": 0.5}, {"top_p": 0.7}, {"top_k": 5}, {"temperature": 0.0}]
PROMPTS = [np.random.default_rng(n).integers(0, 256, n).astype(np.int32) for n in (1, 9, 33, 70)]
# The mean |difference|. Among 320 tokens logprobs are about -6, where fp32 numbers are 2^-21 = 5e-7 apart: it is twenty
# of those. Training moves them a thousand times as far.
CLOSE = 1e-5


@pytest.fixture(scope="module")
def sampler(base: Path) -> Iterator[SamplerBackend]:
    settings = SamplerSettings(backend="transformers", max_batch=8)
    backend = create_sampler(BaseModelSettings(name="tiny", path=str(base), dtype="float32", sampler=settings))
    backend.open()
    yield backend
    backend.close()


def forward(trainer: Trainer, model: str, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """The trainer's logprob of every token but the first."""
    batch = Batch(
        Ragged.of([tokens[:-1] for tokens in sequences], np.int32),
        {"target_tokens": Ragged.of([tokens[1:] for tokens in sequences], np.int64)},
    )
    return list(run(trainer, model, ForwardBackward(batch, "cross_entropy", forward_only=True)).logprobs)


@pytest.mark.parametrize("spec", [LoraSpec(rank=4, seed=1), LoraSpec(rank=32, seed=2)], ids=["rank 4", "rank 32"])
def test_sampled_and_prompt_logprobs_are_the_trainers_own(
    trainer: Trainer, create: Callable[..., str], sampler: SamplerBackend, tmp_path: Path, spec: LoraSpec
) -> None:
    model = create(spec, steps=4)
    trainer.capture(model, optimizer=False)(tmp_path)
    sampler.load(model, tmp_path)
    found, sequences = [], []
    for prompt in PROMPTS:
        for shape in SHAPES:
            request = SampleRequest(prompt, 2, 20, seed=len(sequences), ignore_eos=True, prompt_logprobs=True, **shape)
            output = sampler.sample(model, request)
            for sample in output.sequences:
                sequences.append(np.concatenate([prompt, sample.tokens]))
                found.append(np.concatenate([output.prompt_logprobs[1:], sample.logprobs]))
    trained = np.concatenate(forward(trainer, model, sequences))
    assert np.abs(np.concatenate(found) - trained).mean() < CLOSE
    untrained = np.concatenate([sampler.sample(None, _scored(tokens)).prompt_logprobs[1:] for tokens in sequences])
    assert np.abs(untrained - trained).mean() > 1e3 * CLOSE, "training changed nothing that this could see"
    sampler.evict(model)


def _scored(tokens: np.ndarray) -> SampleRequest:
    return SampleRequest(tokens, 1, 1, 0, prompt_logprobs=True)
