"""A stack that reads images: the cookbook's VLM classifier with its default options, and a chat with an image."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
from tinker import types
from transformers import AutoTokenizer

from tests import pictures
from tests.contract.stack import API_KEY, Stack, running
from tests.recipes import vlm_classifier
from tests.recipes.programs import metrics
from tests.recipes.run import run


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(vlm_classifier.serving(tmp_path_factory.mktemp("stack") / "tiny")) as stack:
        yield stack


@pytest.fixture(scope="module")
def log(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = vlm_classifier.lay_out(tmp_path_factory.mktemp("vlm"))
    code = run("vlm_classifier", stack.url, API_KEY, [], folder)
    assert code == 0, (folder / "output").read_text()[-5000:]
    (found,) = (folder / "log").rglob("metrics.jsonl")
    return found.parent


def test_the_classifier_learns_from_pictures(log: Path):
    losses = metrics(log, "train_mean_nll")
    assert len(losses) == vlm_classifier.STEPS
    assert losses[-1] < losses[0]


def test_it_is_evaluated_on_other_pictures_than_it_trains_on(log: Path):
    (loss,) = metrics(log, "test/nll")
    assert loss == pytest.approx(metrics(log, "train_mean_nll")[0], rel=0.05), "before the first step"
    assert metrics(log, "accuracy") == [0.0], "a random model names no colour"


def test_a_chat_with_an_image_samples_what_the_sdk_samples_of_the_same_image(stack: Stack):
    file, tokenizer = pictures.encoded(pictures.picture(24, 16)), AutoTokenizer.from_pretrained(stack.base_path)
    url = {"url": f"data:image/png;base64,{pictures.text(file)}"}
    question = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": url}]
    before, after = (
        types.EncodedTextChunk(tokens=tokenizer.encode(text))
        for text in ("What is it?<|vision_start|>", "<|vision_end|>")
    )
    prompt = types.ModelInput(chunks=[before, types.ImageChunk(data=file, format="png", expected_tokens=6), after])
    with stack.client() as service, openai.OpenAI(base_url=f"{stack.url}/oai/api/v1", api_key=API_KEY) as client:
        answer = client.chat.completions.create(
            model=vlm_classifier.BASE,
            messages=[{"role": "user", "content": question}],
            temperature=0.0,
            max_tokens=16,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        sampler = service.create_sampling_client(base_model=vlm_classifier.BASE).result()
        asked = types.SamplingParams(max_tokens=16, temperature=0.0)
        (expected,) = sampler.sample(prompt, 1, asked).result().sequences
    (choice,) = answer.choices
    scores = [entry.logprob for entry in choice.logprobs.content]
    assert choice.token_ids == expected.tokens
    np.testing.assert_allclose(scores, expected.logprobs[: len(scores)], atol=1e-4)
