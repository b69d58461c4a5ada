"""An adapter of PEFT, or a checkpoint of transformers, is trained on and sampled from, at the logprobs of PEFT or
transformers themselves."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from app.services.tenants.authentication import project_of
from tests.contract.data import ADAM, datum, logprobs, sentences, supervised
from tests.contract.stack import API_KEY, BASE, Stack
from tests.models import tiny_qwen3

RANK, ALPHA = 6, 9


@pytest.fixture
def adapter(base_path: Path, tmp_path: Path) -> Path:
    """An adapter with random weights, on the groups attn and mlp."""
    torch.manual_seed(0)
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    base = AutoModelForCausalLM.from_pretrained(base_path, dtype=torch.float32)
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def call(stack: Stack, route: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"X-API-Key": API_KEY, "Content-Type": "application/json"}
    request = urllib.request.Request(f"{stack.url}/api/v1/{route}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def upload(stack: Stack, folder: Path) -> str:
    """Makes the three calls that the public documentation of SDK 0.39 describes; returns the checkpoint's path."""
    lora = {"rank": RANK, "train_unembed": False}
    started = call(stack, "external_weights_upload_start", {"base_model": BASE, "lora_config": lora})
    for name, url in started["urls"].items():
        with urllib.request.urlopen(urllib.request.Request(url, (folder / name).read_bytes(), method="PUT")):
            pass
    return str(call(stack, "external_weights_upload_finish", {"upload_id": started["upload_id"]})["tinker_path"])


def scores(folder: Path, base_path: Path, tokens: list[int]) -> list[float]:
    """PEFT's logprob of each token but the first."""
    base = AutoModelForCausalLM.from_pretrained(base_path, dtype=torch.float32)
    with torch.no_grad():
        found = PeftModel.from_pretrained(base, folder).eval()(torch.tensor([tokens])).logits.log_softmax(-1)[0]
    return [float(found[i, token]) for i, token in enumerate(tokens[1:])]


def test_training_goes_on_from_an_uploaded_adapter(
    stack: Stack, service: tinker.ServiceClient, adapter: Path, base_path: Path
):
    path, tokens = upload(stack, adapter), sentences(1)[0]
    training = service.create_training_client_from_state(path).result()
    found = logprobs(training.forward([datum(tokens)], "cross_entropy").result())
    np.testing.assert_allclose(found[:-1], scores(adapter, base_path, tokens), rtol=1e-5, atol=1e-5)
    before = training.forward_backward(supervised(), "cross_entropy").result().metrics["loss:sum"]
    training.optim_step(ADAM).result()
    assert training.forward(supervised(), "cross_entropy").result().metrics["loss:sum"] < before
    listed = tinker.RestClient(base_url=stack.url, api_key=API_KEY).list_user_checkpoints().result().checkpoints
    assert path in [checkpoint.tinker_path for checkpoint in listed]


def test_an_uploaded_adapter_is_sampled_from(
    stack: Stack, service: tinker.ServiceClient, adapter: Path, base_path: Path
):
    path, tokens = upload(stack, adapter), sentences(1)[0]
    sampling = service.create_sampling_client(model_path=path).result()
    found = sampling.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()
    np.testing.assert_allclose(found[1:], scores(adapter, base_path, tokens), atol=2e-3)


def test_a_damaged_file_is_refused_when_the_upload_is_finished(stack: Stack, adapter: Path):
    tensors = adapter / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-4])
    with pytest.raises(urllib.error.HTTPError) as refused:
        upload(stack, adapter)
    assert (refused.value.code, b"safetensors" in refused.value.read()) == (400, True)


def imported(stack: Stack, folder: Path) -> str:
    """Runs `tinsmith import` beside the stack; returns the path that it prints."""
    command = [sys.executable, "-m", "app.cli", "import", str(folder), "--base-model", BASE]
    # Other tests on this stack make projects.
    command += ["--project", project_of(stack.settings().api_keys[0])]
    return subprocess.check_output([*command, "--data-dir", str(stack.data_dir)], text=True).strip()


@pytest.mark.parametrize("stack", ["deepspeed-1-transformers"], indirect=True)
def test_an_adapter_is_imported_by_the_command_line(
    stack: Stack, service: tinker.ServiceClient, adapter: Path, base_path: Path
):
    tokens = sentences(1)[0]
    training = service.create_training_client_from_state(imported(stack, adapter)).result()
    found = logprobs(training.forward([datum(tokens)], "cross_entropy").result())
    np.testing.assert_allclose(found[:-1], scores(adapter, base_path, tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stack", ["deepspeed-1-transformers"], indirect=True)
def test_a_checkpoint_of_transformers_is_trained_in_full_and_sampled_from(
    stack: Stack, service: tinker.ServiceClient, tmp_path: Path
):
    folder, tokens = tiny_qwen3(tmp_path / "tuned", seed=5), sentences(1)[0]
    path = imported(stack, folder)
    training = service.create_training_client_from_state(path).result()
    assert training.get_info().is_lora is False
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([tokens])).logits[0]
    expected = [float(logits[i].log_softmax(-1)[token]) for i, token in enumerate(tokens[1:])]
    found = logprobs(training.forward([datum(tokens)], "cross_entropy").result())
    np.testing.assert_allclose(found[:-1], expected, rtol=1e-5, atol=1e-5)
    sampling = service.create_sampling_client(model_path=path).result()
    scored = sampling.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()
    np.testing.assert_allclose(scored[1:], expected, atol=2e-3)


@pytest.mark.parametrize("stack", ["deepspeed-1-transformers"], indirect=True)
def test_a_checkpoint_of_another_configuration_is_a_failed_call_that_names_the_field(
    stack: Stack, service: tinker.ServiceClient, tmp_path: Path
):
    path = imported(stack, tiny_qwen3(tmp_path / "tuned", rms_norm_eps=0.1))
    with pytest.raises(tinker.RequestFailedError, match="rms_norm_eps"):
        service.create_training_client_from_state(path).result()
