"""Additions to the worker processes of vLLM, in a separate sampler: one start of vLLM, killed at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from tests.models import VOCAB_SIZE, tiny_qwen3

PROMPT = list(range(40, 60))
SAMPLER = """
import json, sys
from pathlib import Path
import numpy as np
from app.domain.sampling import SampleRequest
from app.settings import BaseModelSettings, SamplerSettings
from workers.backends.sampling.base import create

if __name__ == "__main__":
    folder, prompt = Path(sys.argv[1]), np.array(json.loads(sys.argv[2]), np.int32)
    sampler = SamplerSettings(backend="vllm", max_batch=4, max_loras=1, memory_share=0.01)
    base = BaseModelSettings(name="t", path=str(folder), dtype="float32", max_context=64, max_rank=8, sampler=sampler)
    backend = create(base)
    info = backend.open()
    backend.load("adapter", folder / "adapter")
    output = backend.sample("adapter", SampleRequest(prompt, 1, 1, 0, prompt_logprobs=True))
    print("ready", json.dumps([info.trainable_groups, output.prompt_logprobs[1:].tolist()]), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2, whose vLLM class does not list lm_head among adapter targets, and an adapter on lm_head."""
    folder = tmp_path_factory.mktemp("qwen2")
    AutoTokenizer.from_pretrained(tiny_qwen3(tmp_path_factory.mktemp("qwen3"))).save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray:
    """PEFT's logprobs of PROMPT[1:]; saves the adapter."""
    config = LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder / "adapter", save_embedding_layers=False)
    with torch.no_grad():
        table = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return table[:-1].gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def sampler(folder: Path, expected: np.ndarray) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running sampler process, and its output when it was ready."""
    script = folder / "sampler.py"
    script.write_text(SAMPLER)
    command = [sys.executable, str(script), str(folder), json.dumps(PROMPT)]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ
    ) as process:
        yield process, next(line for line in process.stdout if line.startswith("ready "))
        process.kill()


def test_an_adapter_on_a_head_that_vllm_does_not_name_scores_as_in_peft(sampler, expected):
    _, ready = sampler
    groups, logprobs = json.loads(ready.removeprefix("ready "))
    assert groups == ["attn", "mlp", "unembed"]
    np.testing.assert_allclose(logprobs, expected, atol=1e-3)


def test_vllms_processes_end_with_a_killed_sampler(sampler):
    process, _ = sampler
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    os.kill(process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=60)
    for child in alive:
        child.kill()
    assert not alive
