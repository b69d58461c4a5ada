"""Downloads of a model behind signed URLs: PEFT files for a real `peft`, or the merged model for transformers alone."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.contract.data import datum, logprobs, sentences, train
from tests.contract.stack import API_KEY, BASE, Stack


def exported(training: tinker.TrainingClient, stack: Stack) -> dict[str, str]:
    train(training, 3)
    path = training.save_weights_external("home").result().path
    rest = tinker.RestClient(base_url=stack.url, api_key=API_KEY)
    found = rest.get_external_weights_urls(path).result()
    assert found.expires.tzinfo is not None
    return dict(found.urls)


@pytest.fixture
def urls(training: tinker.TrainingClient, stack: Stack) -> dict[str, str]:
    return exported(training, stack)


def download(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        return answer.read()


def test_the_downloaded_adapter_scores_as_the_trainer_does(
    training: tinker.TrainingClient, urls: dict[str, str], base_path: Path, tmp_path: Path
):
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(urls)
    for name, url in urls.items():
        (tmp_path / name).write_bytes(download(url))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == BASE, "not the folder on the server"
    base = AutoModelForCausalLM.from_pretrained(base_path, dtype=torch.float32)
    check_scores(PeftModel.from_pretrained(base, tmp_path).eval(), training)


def test_a_client_that_asks_for_it_at_the_start_downloads_the_merged_model(
    service: tinker.ServiceClient, stack: Stack, tmp_path: Path
):
    asked = {"export_format": "huggingface"}
    training = service.create_lora_training_client(base_model=BASE, rank=8, seed=3, user_metadata=asked).result()
    urls = exported(training, stack)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(urls)
    for name, url in urls.items():
        (tmp_path / name).write_bytes(download(url))
    check_scores(AutoModelForCausalLM.from_pretrained(tmp_path), training)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer("two words")["input_ids"]) == "two words"


def check_scores(model: torch.nn.Module, training: tinker.TrainingClient) -> None:
    """Checks that the downloaded model gives the trainer's logprobs."""
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
