"""The groups of weights whose adapters a vLLM sampler takes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from vllm.config.lora import LoRAConfig
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from app.settings import BaseModelSettings
from tests.parity import architectures
from workers.backends.sampling.vllm import patches
from workers.backends.sampling.vllm.backend import VllmSampler
from workers.backends.sampling.vllm.patches import MOST_HEAD_TOKENS
from workers.models import base_model


@pytest.mark.parametrize(("case", "taken"), [("qwen3", ("attn", "mlp", "unembed")), ("qwen3-moe", ("attn", "unembed"))])
def test_vllm_takes_no_adapters_on_experts(case: str, taken: tuple[str, ...], tmp_path: Path) -> None:
    folder = architectures.build(case, tmp_path)
    settings = BaseModelSettings(name="tiny", path=str(folder), dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(folder)
    info = base_model.describe(settings, model, model.dtype)
    sampler = VllmSampler(settings)
    sampler._engine = cast(Any, SimpleNamespace(call=lambda run: [True]))  # vLLM takes adapters on the head
    assert sampler._adaptable(info, model).trainable_groups == taken


@pytest.mark.parametrize("declared", [{}, {"lm_head": "output_embeddings"}])
@pytest.mark.parametrize("beyond", [0, 1])
def test_vllm_is_told_of_a_head_up_to_the_largest_that_it_takes(
    declared: dict[str, str], beyond: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, str]] = []
    load = "vllm.v1.worker.lora_model_runner_mixin.LoRAModelRunnerMixin.load_lora_model"
    monkeypatch.setattr(load, lambda _, model: given.append(model.embedding_modules))
    patches.declare_lm_heads()
    embedding, head = {"embed_tokens": "input_embeddings"}, SimpleNamespace(vocab_size=MOST_HEAD_TOKENS + beyond)
    model = SimpleNamespace(lm_head=None, logits_processor=head, embedding_modules={**embedding, **declared})
    LoRAModelRunnerMixin.load_lora_model(cast(Any, None), cast(Any, model))
    assert given == [embedding if beyond else {**embedding, "lm_head": "output_embeddings"}]


def test_the_largest_head_is_vllms_own() -> None:
    config = LoRAConfig(max_lora_rank=1, max_loras=1, lora_dtype=torch.float16)
    layer: Any = LogitsProcessorWithLoRA.__new__(LogitsProcessorWithLoRA)
    nn.Module.__init__(layer)
    layer.hidden_size, layer.device, layer.sharded_to_full_mapping = 1, torch.device("meta"), None
    for beyond in (0, 1):
        layer.base_layer = SimpleNamespace(vocab_size=MOST_HEAD_TOKENS + beyond)
        with pytest.raises(ValueError, match="vocab size") if beyond else nullcontext():
            layer.create_lora_weights(1, config)
