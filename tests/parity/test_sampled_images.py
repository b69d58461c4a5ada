"""Prompts with images in the transformers sampler: its logprobs against those of the trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from app.domain.images import Image
from app.domain.ops import Batch, ForwardBackward, Ragged
from app.domain.sampling import SampleOutput, SampleRequest
from app.errors import UserOpError
from app.services.openai.images import ImageFile, read
from app.settings import BaseModelSettings, SamplerSettings
from tests import pictures
from tests.models import byte_tokenizer
from tests.parity.test_sampled_architectures import trained
from tests.parity.training import run
from tests.pictures import PLACEHOLDER, image
from workers.backends.sampling.backends import create
from workers.backends.sampling.base import SamplerBackend
from workers.backends.sampling.transformers.batch import RunningBatch
from workers.backends.training.trainer import Trainer


def prompt(seed: int, length: int, *images: Image) -> SampleRequest:
    tokens = np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)
    for one in images:
        tokens[one.position : one.position + one.tokens] = 0
    return SampleRequest(tokens, 2, 6, seed=seed, ignore_eos=True, prompt_logprobs=True, prompt_top=3, images=images)


# Text alone; an image at the start and one more; images over the pieces in which a prompt is scored; no scores.
REQUESTS = (
    prompt(1, 12),
    prompt(2, 30, image(24, 16, 1), image(16, 40, 2, position=11)),
    prompt(3, 300, *(image(64, 64, n, position=5 + 70 * n) for n in range(4))),
    replace(prompt(4, 20, image(40, 16, 3, position=4)), prompt_logprobs=False, prompt_top=0),
)


@dataclass
class Pair:
    base: Path
    trainer: Trainer
    sampler: SamplerBackend

    def sample(self, requests: Sequence[SampleRequest]) -> list[SampleOutput]:
        with ThreadPoolExecutor() as threads:
            return list(threads.map(lambda request: self.sampler.sample("m", request), requests))


@pytest.fixture(scope="module", params=pictures.FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    base = pictures.tiny_reader(request.param, folder / "base")
    byte_tokenizer().save_pretrained(base)
    trainer = trained(base, folder / "adapter")
    settings = SamplerSettings(backend="transformers")
    sampler = create(BaseModelSettings(name="tiny", path=str(base), dtype="float32", sampler=settings))
    sampler.open()
    sampler.load("m", folder / "adapter")
    yield Pair(base, trainer, sampler)
    sampler.close()


def scored(trainer: Trainer, tokens: np.ndarray, images: Sequence[Image]) -> np.ndarray:
    """The trainer's logprob of every token but the first."""
    batch = Batch(
        Ragged.of([tokens[:-1]], np.int32), {"target_tokens": Ragged.of([tokens[1:]], np.int64)}, tuple(images)
    )
    return run(trainer, "m", ForwardBackward(batch, "cross_entropy", forward_only=True)).logprobs.values


def test_sampled_and_prompt_logprobs_are_the_trainers_own(pair: Pair) -> None:
    for request, output in zip(REQUESTS, pair.sample(REQUESTS), strict=True):
        length = len(request.prompt)
        for sample in output.sequences:
            wanted = scored(pair.trainer, np.concatenate([request.prompt, sample.tokens]), request.images)
            np.testing.assert_allclose(sample.logprobs, wanted[length - 1 :], atol=1e-4)
            if output.prompt_logprobs is not None:
                # At an image's positions too: the logprob of token 0, the target that the cookbook has there.
                np.testing.assert_allclose(output.prompt_logprobs[1:], wanted[: length - 1], atol=1e-4)


def test_samples_are_the_same_though_memory_ran_out_in_a_step(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    before = pair.sample(REQUESTS)
    step, calls = RunningBatch.step, count(1)

    def fourth_runs_out(batch: RunningBatch) -> None:
        step(batch)
        if next(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(RunningBatch, "step", fourth_runs_out)
    for request, one, other in zip(REQUESTS, pair.sample(REQUESTS), before, strict=True):
        for mine, theirs in zip(one.sequences, other.sequences, strict=True):
            assert mine.tokens.tolist() == theirs.tokens.tolist(), request.seed
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)
    assert next(calls) > 4


def test_a_prompt_with_an_image_of_other_tokens_is_refused_and_the_next_one_runs(pair: Pair) -> None:
    wrong = replace(REQUESTS[1], images=(REQUESTS[1].images[0], replace(REQUESTS[1].images[1], tokens=9)))
    with pytest.raises(UserOpError, match=r"prompt: the image at position 11 .* 10 tokens .* is 9"):
        pair.sample([wrong])
    assert len(pair.sample([REQUESTS[1]])[0].sequences) == 2


def test_images_of_a_chat_that_the_api_counts_and_places_are_sampled(pair: Pair) -> None:
    files = [ImageFile("it", one.format, one.data) for one in (image(40, 11, 1), image(9, 33, 2, form="jpeg"))]
    placed = read(pair.base).place(np.array([1, PLACEHOLDER, 2, PLACEHOLDER], np.int32), files)
    request = replace(REQUESTS[1], prompt=placed.tokens, images=tuple(placed.images))
    assert len(pair.sample([request])[0].sequences) == 2
