"""Reads all weights of a model from a folder, under any names that transformers gives them there."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from app.errors import BadRequest, UserOpError
from app.services.imports import full_weights
from app.settings import BaseModelSettings, LimitSettings
from tests import packed_checkpoints
from tests.parity.architectures import build, class_name
from workers.backends.training.base import OPTIMIZER_FILE
from workers.models import base_model
from workers.models.full_weights import (
    Stored,
    check_config,
    check_fits,
    huggingface_writer,
    tensors_in,
    weight_shapes,
    weights_for,
)


def copied(source: Path, folder: Path) -> tuple[Path, Mapping[str, Tensor]]:
    """A folder as a trainer writes it, and its weights by the names of a model in memory."""
    model = AutoModelForCausalLM.from_pretrained(source)
    weights = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    folder.mkdir()
    huggingface_writer(model, dict(weights), torch.float32, str(source))(folder)
    return folder, weights


@pytest.mark.parametrize("case", ["llama", "llama, tied head", "qwen3-moe"])
def test_every_weight_is_found_as_it_was_written(case: str, tmp_path: Path) -> None:
    """Experts have other names in files than in memory."""
    base = build(case, tmp_path / "base")
    folder, written = copied(base, tmp_path / "copy")
    model = AutoModelForCausalLM.from_pretrained(base)
    check_fits(folder, model)
    found = dict(weights_for(model, folder))
    assert found.keys() == written.keys()
    assert all(torch.equal(found[name], written[name]) for name in written)


def test_weights_that_a_file_has_transposed_are_turned(tmp_path: Path) -> None:
    """Qwen3-VL's published experts have the names of those in memory, and other shapes."""
    base = build("qwen3-vl-moe", tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(base)
    wanted = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    turned = {name: t.mT.contiguous() if ".experts." in name else t for name, t in tensors_in(base)}
    save_file(turned, base / "model.safetensors", metadata={"format": "pt"})
    found = dict(weights_for(model, base))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted if ".down_proj" in name)


def test_weights_of_one_name_in_files_and_memory_are_read_one_at_a_time(tmp_path: Path) -> None:
    base = build("llama", tmp_path / "base")
    read: list[weakref.ref[Tensor]] = []
    for _, tensor in weights_for(AutoModelForCausalLM.from_pretrained(base), base):
        assert all(earlier() is None for earlier in read)
        read.append(weakref.ref(tensor))
        del tensor
    assert len(read) > 1


@pytest.mark.parametrize("case", ["llama", "llama, tied head", "qwen3-moe", "gpt-oss, packed"])
def test_a_rank_reads_the_weights_that_it_keeps_and_of_the_others_the_names(case: str, tmp_path: Path) -> None:
    family, _, form = case.partition(", p")
    base = build(family, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    if form:
        packed_checkpoints.mxfp4(base)
    whole = base_model.read_weights(str(base), model)
    kept = [*whole][1::2]
    found = base_model.read_weights(str(base), model, kept)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in kept)
    tied = model.all_tied_weights_keys
    assert all(len(found[name]) == 0 for name in whole.keys() - {*kept, *tied, *tied.values()})


def test_an_optimizers_tensors_are_no_weights(tmp_path: Path) -> None:
    base = build("llama", tmp_path / "base")
    names = [name for name, _ in tensors_in(base)]
    save_file({"moment": torch.zeros(1)}, base / OPTIMIZER_FILE)
    assert [name for name, _ in tensors_in(base)] == names


RENAMED = (
    *("mixtral", "minimax-m2", "gemma3, vision", "mistral3", "nemotron-h", "kimi-linear", "inkling, vision"),
    *("qwen3-vl-moe", "qwen3-moe", "llama, tied head"),
)


@pytest.mark.parametrize("case", RENAMED)
def test_a_folder_that_transformers_writes_is_imported_for_its_own_base(case: str, tmp_path: Path) -> None:
    folder = build(case, tmp_path)
    shapes = weight_shapes(BaseModelSettings(name="base", path=str(folder)))
    assert set(full_weights.read(folder, class_name(case), shapes, LimitSettings())) >= {"model.safetensors"}
    name = min(shapes)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, name: weights[name][:1].clone()}, folder / "model.safetensors")
    with pytest.raises(BadRequest, match=f"{re.escape(name)} has the shape"):
        full_weights.read(folder, class_name(case), shapes, LimitSettings())


@pytest.mark.parametrize("case", ["llama, tied head", "qwen3-moe", "gpt-oss", "deepseek-v3", "nemotron-h", "qwen3-vl"])
def test_of_a_folder_with_further_tensors_those_of_the_model_are_named(case: str, tmp_path: Path) -> None:
    base = build(case, tmp_path / "base")
    model = base_model.skeleton(BaseModelSettings(name="tiny", path=str(base)))
    names = [name for name, _ in tensors_in(base)]
    assert sorted(Stored(model).names_in(base)) == sorted(names)
    path = base / "model.safetensors"
    further = {"v_head.summary.weight": torch.ones(1), f"{names[0]}.further": torch.ones(1)}
    save_file(load_file(path) | further, path)
    assert sorted(Stored(model).names_in(base)) == sorted(names)
    assert [name for name, _ in tensors_in(base, names[:2])] == sorted(names[:2])


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.experts.2.up_proj.weight"])
def test_a_tensor_that_is_missing_or_of_another_shape_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    base = build("qwen3-moe", tmp_path / "base")
    stored, path = Stored(AutoModelForCausalLM.from_pretrained(base)), base / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {name: torch.ones(3)}, path)
    with pytest.raises(UserOpError, match=rf"{name} has the shape \[3\], but this base model needs"):
        stored.names_in(base)
    save_file({other: tensors[other] for other in tensors if other != name}, path)
    with pytest.raises(UserOpError, match=f"{name} is missing"):
        stored.names_in(base)


def test_experts_that_are_stored_as_they_are_in_memory_are_named(tmp_path: Path) -> None:
    base = build("qwen3-moe", tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, base / "model.safetensors")
    assert sorted(Stored(model).names_in(base)) == sorted(model.state_dict())


@pytest.mark.parametrize("other", ["llama, tied head", "qwen3"])
def test_a_folder_of_another_model_is_refused(other: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(build("llama", tmp_path / "base"))
    with pytest.raises(UserOpError, match="no weights of this base model"):
        check_fits(build(other, tmp_path / "other"), model)


@pytest.mark.parametrize(("name", "value"), [("rms_norm_eps", 0.5), ("hidden_act", "gelu"), ("num_attention_heads", 1)])
def test_weights_that_were_made_with_another_configuration_are_refused(
    name: str, value: object, tmp_path: Path
) -> None:
    """The base model's own configuration would be used, and silently compute something else."""
    base = build("llama", tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, name: value, "use_cache": False, "pad_token_id": 1}))
    with pytest.raises(UserOpError, match=f"made with {name} "):
        check_config(base, model)
    (base / "config.json").write_text(json.dumps({**config, "use_cache": False, "pad_token_id": 1}))
    check_config(base, model)
    check_fits(base, model)


BUFFERS = {
    "deepseek-v3": "model.layers.1.mlp.gate.e_score_correction_bias",
    "minimax-m2": "model.layers.0.block_sparse_moe.e_score_correction_bias",
    "inkling, vision": "model.llm.layers.1.mlp.gate.bias",
    "gemma4": "model.layers.0.layer_scalar",
}


@pytest.mark.parametrize("case", BUFFERS)
@pytest.mark.parametrize("check", [check_config, check_fits])
def test_a_buffer_other_than_the_bases_is_refused_by_name(
    case: str, check: Callable[[Path, Any], None], tmp_path: Path
) -> None:
    """The base's own is used, as only parameters are read."""
    folder = build(case, tmp_path)
    model = base_model.load(BaseModelSettings(name="base", path=str(folder), dtype="bfloat16")).model
    check(folder, model)
    weights = load_file(folder / "model.safetensors")
    weights[BUFFERS[case]] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserOpError, match=f"{re.escape(BUFFERS[case])}.* differs"):
        check(folder, model)
    with torch.device("meta"):
        check(folder, type(model)(model.config))  # it reads the file's own


def test_a_buffer_that_was_rounded_is_the_bases_own(tmp_path: Path) -> None:
    folder, name = build("deepseek-v3", tmp_path), BUFFERS["deepseek-v3"]
    weights = load_file(folder / "model.safetensors")
    weights[name] += torch.rand(weights[name].shape)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = base_model.load(BaseModelSettings(name="base", path=str(folder), dtype="float32")).model
    rounded = {name: tensor.bfloat16() for name, tensor in weights.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    check_fits(folder, model)


def test_a_field_that_no_model_reads_is_no_reason_to_refuse_a_folder(tmp_path: Path) -> None:
    base = build("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    others = {"unsloth_version": "2026.1", "transformers.js_config": {"dtype": "q4"}, "auto_map": {"AutoConfig": "a.B"}}
    (base / "config.json").write_text(json.dumps({**config, **others}))
    check_config(base, model)
    check_fits(base, model)


@pytest.mark.parametrize(("name", "value"), [("sliding_window", 8), ("rope_parameters", {"rope_theta": 5.0})])
def test_a_field_that_models_read_without_declaring_it_is_compared(name: str, value: object, tmp_path: Path) -> None:
    base = build("qwen3-vl-moe", tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    config["text_config"][name] = value
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserOpError, match=f"made with {name} "):
        check_config(base, model)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    base = build("llama", tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    (base / "model.safetensors").unlink()
    with pytest.raises(UserOpError, match="no weights of this base model"):
        check_fits(base, model)
