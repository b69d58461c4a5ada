"""Each weight of a base model has an adapter, or a reason for having none; a model with any other weight is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from app.errors import UnservableModel
from app.settings import BaseModelSettings, SamplerSettings
from tests.models import tiny_qwen3
from workers.backends.sampling.base import create as create_sampler
from workers.models import base_model, lora
from workers.models.coverage import undecided

_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def on_meta(name: str, **fields: Any) -> Any:
    """A model without values. `name` is transformers' name of its configuration, without "Config"."""
    config = getattr(transformers, f"{name}Config")(**fields)
    with torch.device("meta"):
        return base_model.auto_class(config).from_config(config)


@pytest.mark.parametrize("name", ["Qwen3_5", "Qwen3VL", "Gemma3", "Mistral3"])
def test_only_the_language_model_of_a_model_that_reads_images_gets_adapters(name: str) -> None:
    model = on_meta(name)
    paths = lora.targets(model)
    assert undecided(model) == []
    assert all(path.startswith("model.language_model.layers.") for path in paths["attn"] + paths["mlp"])
    assert paths["attn"] and paths["mlp"]


def test_a_gated_delta_net_is_adapted_in_all_its_linears() -> None:
    layers = ["linear_attention", "full_attention"]
    paths = lora.targets(on_meta("Qwen3_5Text", **_SHAPE, layer_types=layers))["attn"]
    names = {path.rpartition(".")[2] for path in paths if ".layers.0." in path}
    assert names == {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"}


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss", "Glm4Moe", "Llama4Text"])
def test_a_model_with_experts_offers_no_mlp_group(name: str) -> None:
    model = on_meta(name, **_SHAPE)
    assert undecided(model) == []
    assert [group for group, paths in lora.targets(model).items() if paths] == ["attn", "unembed"]


def test_a_dense_layer_beside_experts_gives_no_thin_adapter() -> None:
    assert lora.targets(on_meta("Glm4Moe", **_SHAPE, first_k_dense_replace=1))["mlp"] == []


def test_unknown_modules_are_named_once_in_one_line(tmp_path: Path) -> None:
    settings = BaseModelSettings(name="odd", path=str(tiny_qwen3(tmp_path)), dtype="float32")
    model = base_model.load(settings).model
    for layer in model.model.layers:
        layer.mlp.extra = torch.nn.Linear(4, 4)
        layer.mlp.stacked = torch.nn.Parameter(torch.zeros(2, 4, 4))
    with pytest.raises(UnservableModel) as caught:
        base_model.describe(settings, model, torch.float32)
    assert str(caught.value) == (
        "base model 'odd' (Qwen3ForCausalLM) cannot be trained with LoRA: it has modules that Tinsmith does not know: "
        "model.layers.*.mlp.extra, model.layers.*.mlp.stacked"
    )


def test_a_model_that_reads_images_loads_from_its_published_layout(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    text = {**_SHAPE, "vocab_size": 320, "layer_types": ["linear_attention", "full_attention"]}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    saved = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    saved.save_pretrained(tmp_path)
    loaded = base_model.load(BaseModelSettings(name="q", path=str(tmp_path), dtype="float32"))
    assert loaded.info.arch == "Qwen3_5ForConditionalGeneration"
    assert loaded.info.vocab_size == 320
    found, wanted = loaded.model.state_dict(), saved.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_transformers_sampler_refuses_a_recurrent_model_at_start(tmp_path: Path) -> None:
    layers = ["linear_attention", "full_attention"]
    transformers.Qwen3_5TextConfig(**_SHAPE, layer_types=layers).save_pretrained(tmp_path)
    sampler = SamplerSettings(backend="transformers")
    settings = BaseModelSettings(name="q", path=str(tmp_path), dtype="float32", sampler=sampler)
    with pytest.raises(UnservableModel, match=r"base model 'q' cannot be sampled .* type linear_attention"):
        create_sampler(settings).open()
