"""Taking the adapter home: PEFT files behind signed URLs, and a real `peft` that loads them."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.contract.data import datum, logprobs, sentences, train
from tests.contract.stack import API_KEY, Stack


@pytest.fixture
def urls(training: tinker.TrainingClient, stack: Stack) -> dict[str, str]:
    train(training, 3)
    path = training.save_weights_external("home").result().path
    rest = tinker.RestClient(base_url=stack.url, api_key=API_KEY)
    found = rest.get_external_weights_urls(path).result()
    assert found.expires.tzinfo is not None
    return dict(found.urls)


def download(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        return answer.read()


def test_the_downloaded_adapter_scores_as_the_trainer_does(
    training: tinker.TrainingClient, urls: dict[str, str], base_path: Path, tmp_path: Path
):
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(urls)
    for name, url in urls.items():
        (tmp_path / name).write_bytes(download(url))
    base = AutoModelForCausalLM.from_pretrained(base_path, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path).eval()
    tokens = sentences(1)[0]
    with torch.no_grad():
        scores = model(torch.tensor([tokens])).logits.log_softmax(-1)[0]
    expected = [float(scores[i, token]) for i, token in enumerate(tokens[1:])]
    found = logprobs(training.forward([datum(tokens)], "cross_entropy").result())
    np.testing.assert_allclose(found[:-1], expected, atol=1e-4)


def test_a_url_that_was_tampered_with_is_refused(urls: dict[str, str]):
    url = urls["adapter_config.json"]
    signature = re.search("(?i)signature=([0-9a-f])", url)
    assert signature is not None
    flipped = "0" if signature[1] != "0" else "1"
    for forged in (
        url.replace("adapter_config.json", "adapter_model.safetensors"),
        url[: signature.start(1)] + flipped + url[signature.end(1) :],
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            download(forged)
        assert refused.value.code == 403
