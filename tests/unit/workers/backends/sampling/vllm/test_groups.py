"""The groups of weights whose adapters a vLLM sampler takes."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from vllm.config.lora import LoRAConfig
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
from vllm.model_executor.models.utils import WeightsMapper
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from app.domain.records import BaseModelInfo
from app.settings import BaseModelSettings
from tests.parity import architectures
from workers.backends.sampling.vllm import patches
from workers.backends.sampling.vllm.backend import VllmAdapters, VllmSampler
from workers.backends.sampling.vllm.patches import MOST_HEAD_TOKENS
from workers.backends.sampling.vllm.worker import Extension
from workers.models import base_model


@pytest.mark.parametrize(("case", "taken"), [("qwen3", ("attn", "mlp", "unembed")), ("qwen3-moe", ("attn", "unembed"))])
def test_vllm_takes_no_adapters_on_experts(case: str, taken: tuple[str, ...], tmp_path: Path) -> None:
    folder = architectures.build(case, tmp_path)
    settings = BaseModelSettings(name="tiny", path=str(folder), dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(folder)
    info = base_model.describe(settings, model, model.dtype)
    assert groups_of(settings, model, info, without="") == taken


@pytest.mark.parametrize(("without", "taken"), [("lm_head", ("attn", "mlp")), ("o_proj", ("mlp", "unembed"))])
def test_a_group_with_a_module_that_vllm_does_not_adapt_is_not_offered(
    without: str, taken: tuple[str, ...], tmp_path: Path
) -> None:
    folder = architectures.build("qwen3", tmp_path)
    settings = BaseModelSettings(name="tiny", path=str(folder), dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert groups_of(settings, model, base_model.describe(settings, model, model.dtype), without) == taken


class Ranks:
    """Stand-in for vLLM on two ranks, which adapt every second module each, but for modules of a name."""

    def __init__(self, without: str) -> None:
        self.without = without

    async def collective_rpc(self, method: str, args: tuple[list[str]]) -> list[list[str]]:
        assert method == "adapted"
        adapted = [path for path in args[0] if path.rpartition(".")[2] != self.without]
        return [adapted[::2], adapted[1::2]]


def groups_of(settings: BaseModelSettings, model: nn.Module, info: BaseModelInfo, without: str) -> tuple[str, ...]:
    sampler = VllmSampler(settings)
    sampler._engine = cast(Any, SimpleNamespace(call=lambda run: asyncio.run(run(Ranks(without)))))
    with patch.object(VllmAdapters, "use_zero_for_base"):
        return sampler._adapters(model, info)[1].trainable_groups


def test_vllm_names_the_modules_of_an_adapter_that_it_applies() -> None:
    """It joins some, and its own names differ from those in the file."""
    mapper = WeightsMapper(orig_to_new_prefix={"model.language_model.": "language_model.model."})
    manager = SimpleNamespace(
        modules={
            "language_model.model.layers.0.attn.o_proj": None,
            "language_model.model.layers.0.attn.qkv_proj": None,
        },
        packed_modules={
            "language_model.model.layers.0.attn.qkv_proj": ["language_model.model.layers.0.attn.k_proj"],
        },
        model=SimpleNamespace(hf_to_vllm_mapper=mapper),
    )
    worker: Any = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager)))
    asked = [
        f"model.language_model.layers.{place}" for place in ("0.attn.o_proj", "0.attn.k_proj", "0.mlp", "1.attn.k_proj")
    ]
    assert Extension.adapted(worker, asked) == asked[:2]
    manager.model = SimpleNamespace()
    assert Extension.adapted(worker, asked) == []
    assert Extension.adapted(worker, ["language_model.model.layers.0.attn.o_proj"])


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
