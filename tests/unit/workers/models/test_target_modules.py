"""Each weight of a base model has an adapter, or a reason for having none; a model with any other weight is refused."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from peft.tuners.lora import LoraLayer

from app.domain.ops import LoraSpec
from app.errors import UnservableModel
from app.settings import BaseModelSettings, SamplerSettings
from tests.models import tiny_opt, tiny_qwen3
from tests.parity import architectures
from tests.parity.architectures import SHAPE
from workers.backends.sampling.backends import create as create_sampler
from workers.models import base_model, experts, lora, peft_files
from workers.models.target_modules import left_out, undecided


def on_meta(name: str, **fields: Any) -> Any:
    """A model without values. `name` is transformers' name of its configuration, without "Config"."""
    config = getattr(transformers, f"{name}Config")(**fields)
    with torch.device("meta"):
        return base_model.auto_class(config).from_config(config)


@pytest.mark.parametrize("name", ["Qwen3_5", "Qwen3VL", "Gemma3", "Mistral3"])
def test_only_the_language_model_of_a_model_that_reads_images_gets_adapters(name: str) -> None:
    model = on_meta(name)
    paths = lora.targets(model)
    assert undecided(model, experts.found(model)) == []
    assert all(path.startswith("model.language_model.layers.") for path in paths["attn"] + paths["mlp"])
    assert paths["attn"] and paths["mlp"]


def test_a_gated_delta_net_is_adapted_in_all_its_linears() -> None:
    layers = ["linear_attention", "full_attention"]
    paths = lora.targets(on_meta("Qwen3_5Text", **SHAPE, layer_types=layers))["attn"]
    names = {path.rpartition(".")[2] for path in paths if ".layers.0." in path}
    assert names == {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"}


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_stacked_experts_are_adapted_as_the_mlp_group(name: str) -> None:
    model = on_meta(name, **SHAPE)
    assert undecided(model, experts.found(model)) == []
    stacked = [f"model.layers.{layer}.mlp.experts" for layer in range(SHAPE["num_hidden_layers"])]
    assert lora.targets(model)["mlp"] == [path + part for path in stacked for part in (".base_layer", "")]


@pytest.mark.parametrize("case", ["llama4", "nemotron-h, latent", "inkling"])
def test_every_tensor_of_a_familys_mlps_is_adapted_whatever_its_layout(case: str) -> None:
    config = architectures.config_of(case)
    with torch.device("meta"):
        model = base_model.auto_class(config).from_config(config)
    of_mlps = re.compile(r"\.(mlp|feed_forward|mixer)\..*(gate|up|gate_up|down|latent)_proj(\.weight)?$")
    wanted = {name for name, _ in model.named_parameters() if of_mlps.search(name)}
    assert {experts.pair_path(name) for name in wanted} == {*lora.targets(model)["mlp"]}
    assert len(wanted) >= 6


def test_experts_of_an_unknown_layout_are_not_adapted_and_neither_are_the_mlps_beside_them() -> None:
    model = on_meta("Llama4Text", **SHAPE)
    for layer in model.model.layers:
        layer.feed_forward.experts.w1 = layer.feed_forward.experts.gate_up_proj
        del layer.feed_forward.experts.gate_up_proj
    assert undecided(model, experts.found(model)) == []
    assert [group for group, paths in lora.targets(model).items() if paths] == ["attn", "unembed"]


def test_dense_and_shared_mlps_beside_experts_are_adapted_with_them() -> None:
    paths = lora.targets(on_meta("Glm4Moe", **SHAPE, first_k_dense_replace=1))["mlp"]
    parts = ("gate_proj", "up_proj", "down_proj")
    dense = {f"model.layers.0.mlp.{part}" for part in parts}
    shared = {f"model.layers.1.mlp.shared_experts.{part}" for part in parts}
    assert set(paths) == dense | shared | {"model.layers.1.mlp.experts.base_layer", "model.layers.1.mlp.experts"}


def test_unknown_linears_and_tensors_are_named_once_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = BaseModelSettings(name="odd", path=str(tiny_qwen3(tmp_path)), dtype="float32")
    model = base_model.skeleton(settings)
    for layer in model.model.layers:
        layer.mlp.extra = torch.nn.Linear(4, 4)
        layer.mlp.stacked = torch.nn.Parameter(torch.zeros(2, 4, 4))
    monkeypatch.setattr(base_model, "skeleton", lambda _: model)
    with pytest.raises(UnservableModel) as caught:
        base_model.check_adaptable(settings)
    assert str(caught.value) == (
        "base model 'odd' (Qwen3ForCausalLM) cannot be trained with LoRA: it has modules that Tinsmith does not know: "
        "model.layers.*.mlp.extra, model.layers.*.mlp.stacked"
    )


def test_a_tensor_is_not_covered_because_it_has_the_name_of_a_linear() -> None:
    """Inkling's shared experts are tensors named gate_proj, up_proj and down_proj."""
    assert "model.layers.*.mlp.shared_experts.gate_proj" in undecided(on_meta("InklingText", **SHAPE), ())


def test_a_model_is_refused_before_its_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_model, "_from_pretrained", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(UnservableModel, match=r"model\.decoder\.layers\.\*\.fc1, model\.decoder\.layers\.\*\.fc2"):
        base_model.check_adaptable(BaseModelSettings(name="odd", path=str(tiny_opt(tmp_path))))


def test_modules_without_adapters_are_named_with_the_reasons() -> None:
    left = left_out(on_meta("Qwen3_5Moe"), ())
    assert set(left) == {
        "model.visual",
        "model.language_model.layers.*.mlp.gate",
        "model.language_model.layers.*.mlp.experts",
        "model.language_model.layers.*.mlp.shared_expert_gate",
        "model.language_model.layers.*.linear_attn.conv1d",
    }
    assert left["model.visual"].startswith("training gives text alone")
    assert left_out(on_meta("Qwen3", **SHAPE), ()) == {}


def test_a_draft_head_an_indexer_and_mambas_output_never_have_an_adapter() -> None:
    linears = ["mtp.layers.0.q_proj", "model.layers.0.self_attn.indexer.wk", "model.layers.0.mixer.out_proj"]
    model = torch.nn.Module()
    for path in linears:
        parent = model
        for name in path.split(".")[:-1]:
            if not hasattr(parent, name):
                parent.add_module(name, torch.nn.Module())
            parent = getattr(parent, name)
        parent.add_module(path.rpartition(".")[2], torch.nn.Linear(2, 2))
    assert undecided(model, experts.found(model)) == []
    assert not any(lora.targets(model).values())


def test_a_model_that_reads_images_loads_from_its_published_layout(tmp_path: Path) -> None:
    architectures.build("qwen3.5, vision", tmp_path)
    saved = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    loaded = base_model.load(BaseModelSettings(name="q", path=str(tmp_path), dtype="float32"))
    assert loaded.info.arch == "Qwen3_5ForConditionalGeneration"
    assert loaded.info.vocab_size == 320
    found, wanted = loaded.model.state_dict(), saved.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_transformers_sampler_refuses_layers_whose_state_it_does_not_hold_at_start(tmp_path: Path) -> None:
    transformers.DeepseekV4Config().save_pretrained(tmp_path)
    sampler = SamplerSettings(backend="transformers")
    settings = BaseModelSettings(name="q", path=str(tmp_path), dtype="float32", sampler=sampler)
    with pytest.raises(UnservableModel, match=r"base model 'q' cannot be sampled .* type compressed_sparse_attention"):
        create_sampler(settings).open()


@pytest.mark.parametrize("case", ["qwen3.5, vision", "qwen3-vl", "gemma3, vision", "inkling, vision"])
def test_peft_puts_a_saved_adapter_on_the_adapters_own_modules_alone(case: str, tmp_path: Path) -> None:
    base = architectures.build(case, tmp_path / "base")
    model = base_model.load(BaseModelSettings(name="q", path=str(base), dtype="float32")).model
    adapter = lora.new_adapter(model, LoraSpec(rank=2, train_mlp=False, train_unembed=False))
    peft_files.write(adapter, tmp_path, str(base), model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT warns of a missing tensor
        adapted = PeftModel.from_pretrained(model, tmp_path)
    found = {path for path, module in adapted.base_model.model.named_modules() if isinstance(module, LoraLayer)}
    assert found == adapter.pairs.keys()
    assert peft_files.read(tmp_path).spec == adapter.spec
