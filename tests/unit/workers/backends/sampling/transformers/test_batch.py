"""Prompts that share a pass. tests/conformance checks their scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.domain.images import Image
from app.domain.sampling import SampleRequest
from app.settings import BaseModelSettings
from tests.models import byte_tokenizer, tiny_qwen3
from tests.parity import architectures
from workers.backends.sampling import vocabulary
from workers.backends.sampling.transformers import batch
from workers.backends.sampling.transformers.jobs import Job
from workers.models import base_model, lora, routers

LENGTHS = (5, 60, 2, 33)
ASKS = (
    {"prompt_logprobs": True},
    {"prompt_logprobs": True, "prompt_last_n": 7, "prompt_top": 3},
    {"prompt_alternatives": 2},
    {"prompt_top": 4},
)


@pytest.mark.parametrize("columns", [1, 3, 256])
def test_prompts_of_mixed_lengths_and_asks_share_passes_and_score_as_alone(tmp_path, monkeypatch, columns):
    settings = BaseModelSettings(name="tiny", path=str(tiny_qwen3(tmp_path)), dtype="float32")
    base, words = base_model.load(settings), vocabulary.load_vocabulary(settings)
    lora.wrap(base.model)

    def jobs() -> list[Job]:
        prompts = [np.random.default_rng(n).integers(0, 256, n).astype(np.int32) for n in LENGTHS]
        requests = [SampleRequest(prompt, 1, 1, 9, **ask) for prompt, ask in zip(prompts, ASKS, strict=True)]
        return [Job(request, "", None, base.info, words) for request in requests]

    alone, together = jobs(), jobs()
    with torch.inference_mode():
        logits = [batch.prefill(base.model, base.device, [job]).logits[0] for job in alone]
        monkeypatch.setattr(batch, "SCORED_PASS_TOKENS", columns * len(LENGTHS))
        prefilled = batch.prefill(base.model, base.device, together)
    torch.testing.assert_close(prefilled.logits, torch.stack(logits), atol=1e-4, rtol=0)
    for one, other in zip(alone, together, strict=True):
        assert one.scores is not None
        np.testing.assert_allclose(other.scores, one.scores, atol=1e-4)


def test_a_prompt_with_images_has_a_pass_of_its_own():
    text, seen = (
        Job(SampleRequest(np.zeros(3, np.int32), 1, 1, 9, images=images), "", None, None, None)
        for images in ((), (Image(0, 1, 1, "png", b""),))
    )
    shares = {
        (jobs[0] is seen, job is seen): batch.fits(jobs, job) for jobs in ([text], [seen]) for job in (text, seen)
    }
    assert shares == {(False, False): True, (False, True): False, (True, False): False, (True, True): False}
    assert batch.fits([], seen)


def test_a_prompt_with_scores_shares_no_pass_with_one_without():
    """The logits of all its tokens take a pass of an eighth of the tokens."""
    plain, scored = (
        Job(SampleRequest(np.zeros(3, np.int32), 1, 1, 9, prompt_logprobs=scores), "", None, None, None)
        for scores in (False, True)
    )
    shares = [[batch.fits([one], job) for job in (plain, scored)] for one in (plain, scored)]
    assert shares == [[True, False], [False, True]]


def test_prompts_that_share_passes_have_the_routes_that_they_have_alone(tmp_path, monkeypatch):
    settings = BaseModelSettings(name="tiny", path=str(architectures.build("qwen3-moe", tmp_path)), dtype="float32")
    byte_tokenizer().save_pretrained(tmp_path)
    base, words = base_model.load(settings), vocabulary.load_vocabulary(settings)
    routers.wrap(base.model)

    def jobs() -> list[Job]:
        prompts = [np.random.default_rng(n).integers(0, 256, n).astype(np.int32) for n in LENGTHS]
        requests = [SampleRequest(prompt, 1, 1, 9) for prompt in prompts]
        return [Job(request, "", None, base.info, words, recorder=routers.Recorder()) for request in requests]

    alone, together = jobs(), jobs()
    with torch.inference_mode():
        for job in alone:
            batch.prefill(base.model, base.device, [job])
        monkeypatch.setattr(batch, "PASS_TOKENS", 7 * len(LENGTHS))
        batch.prefill(base.model, base.device, together)
    for one, other, length in zip(alone, together, LENGTHS, strict=True):
        assert one.prompt_routes is not None and one.prompt_routes.shape == (length, 2, 2)
        assert np.array_equal(one.prompt_routes, other.prompt_routes)
