"""An adapter is taken if it is plain LoRA on whole groups; anything else is refused by its name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save

from app.domain import adapters
from app.domain.adapters import CONFIG_FILE, TENSORS_FILE
from app.domain.ops import LoraSpec
from app.errors import BadRequest
from app.services.imports.peft_files import config_of, most_bytes, read
from app.settings import LimitSettings
from tests.peft_adapters import peft_files, random_tensors, write
from tests.unit.app.conftest import SHAPES

ALL = {**SHAPES["attn"], **SHAPES["mlp"]}
LIMITS = LimitSettings()


def test_the_spec_is_read_from_the_files(tmp_path: Path) -> None:
    write(tmp_path, peft_files(ALL, 4, lora_alpha=10))
    assert read(tmp_path, SHAPES, LIMITS) == LoraSpec(4, True, True, False, alpha=10.0)
    write(tmp_path, peft_files(SHAPES["attn"], 4, target_modules=r".*(q|o)_proj", init_lora_weights="orthogonal"))
    assert read(tmp_path, SHAPES, LIMITS) == LoraSpec(4, True, False, False, alpha=8.0)


CHANGES: dict[str, Any] = {
    "use_rslora": True,
    "use_dora": True,
    "use_qalora": True,
    "lora_bias": True,
    "bias": "lora_only",
    "rank_pattern": {"q_proj": 8},
    "alpha_pattern": {"q_proj": 8},
    "modules_to_save": ["embed_tokens"],
    "trainable_token_indices": [1],
    "layer_replication": [[0, 2]],
    "init_lora_weights": "pissa",
    "task_type": "SEQ_CLS",
    "peft_type": "IA3",
    "an_option_of_tomorrow": 1,
    "r": 0,
    "lora_alpha": "8",
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_that_cannot_be_kept_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, peft_files(ALL, 4, **{name: CHANGES[name]}))
    with pytest.raises(BadRequest, match=rf"adapter_config\.json: {name} is"):
        read(tmp_path, SHAPES, LIMITS)


@pytest.mark.parametrize("alpha", [0, -1, 1e9, True, float("nan"), 10**400])
def test_an_alpha_that_is_no_scale_is_refused(tmp_path: Path, alpha: float) -> None:
    write(tmp_path, peft_files(ALL, 4, lora_alpha=alpha))
    with pytest.raises(BadRequest, match="lora_alpha"):
        read(tmp_path, SHAPES, LIMITS)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"[" * 100_000, b"\xff", b" " * 2**21])
def test_a_configuration_that_is_no_small_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, {**peft_files(ALL, 4), CONFIG_FILE: content})
    with pytest.raises(BadRequest, match=r"adapter_config\.json"):
        read(tmp_path, SHAPES, LIMITS)


def changed(change: str) -> dict[str, Any]:
    found: dict[str, Any] = random_tensors(ALL, 4)
    name = "base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight"
    match change:
        case "a part of a group":
            return {key: tensor for key, tensor in found.items() if "layers.1.self_attn" not in key}
        case "half a pair":
            del found[name]
        case "another rank":
            found[name] = found[name][:3]
        case "another width":
            found[name] = found[name][:, :5]
        case "an unknown module":
            found[name.replace("o_proj", "x_proj")] = found[name]
        case "an embedding":
            found["base_model.model.model.embed_tokens.weight"] = found[name]
        case "nothing":
            return {}
    return found


WORDS = {
    "a part of a group": "layers.1.self_attn.o_proj.lora_A.weight is missing.*group attn",
    "half a pair": "layers.1.self_attn.o_proj.lora_A.weight is missing",
    "another rank": r"o_proj.lora_A.weight has the shape \[3, 8\], but with r 4 this base model needs \[4, 8\]",
    "another width": r"o_proj.lora_A.weight has the shape \[4, 5\]",
    "an unknown module": "x_proj.lora_A.weight' belongs to no adapter of this base model$",
    "an embedding": "embed_tokens.weight'.*save_embedding_layers=False",
    "nothing": "no tensors",
}


@pytest.mark.parametrize("change", WORDS)
def test_tensors_of_another_adapter_are_named(tmp_path: Path, change: str) -> None:
    write(tmp_path, {**peft_files(ALL, 4), TENSORS_FILE: save(changed(change))})
    with pytest.raises(BadRequest) as refused:
        read(tmp_path, SHAPES, LIMITS)
    assert re.search(WORDS[change], str(refused.value)), refused.value


def test_the_bound_of_a_file_lets_the_largest_such_adapter_in_and_not_twice_its_size() -> None:
    spec = LoraSpec(64, True, True, False)
    written = len(peft_files(ALL, 64)[TENSORS_FILE])
    assert written <= most_bytes(SHAPES, spec) < 2 * written + 2**17


def test_the_bound_of_a_file_counts_the_names_of_its_modules() -> None:
    shapes = {"attn": {f"model.{'deep.' * 100}{i}.q_proj": (1, 1, 1) for i in range(200)}}
    assert len(peft_files(shapes["attn"], 1)[TENSORS_FILE]) <= most_bytes(shapes, LoraSpec(1, True, False, False))


def test_every_module_is_named_in_full() -> None:
    config = json.loads(config_of(LoraSpec(4, True, True, False, alpha=10.0), "org/base", SHAPES))
    assert config["target_modules"] == sorted(ALL)
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 10.0, "org/base")
    assert "target_parameters" not in config


def test_beside_experts_the_mlps_are_named_as_tensors() -> None:
    mlp = {"l.0.mlp.down_proj": (4, 4, 1), "l.1.mlp.experts.base_layer": (4, 8, 3), "l.1.mlp.experts": (4, 4, 3)}
    config = json.loads(
        config_of(LoraSpec(4, False, True, False), "b", {"attn": {"l.0.q_proj": (4, 4, 1)}, "mlp": mlp})
    )
    assert config["target_modules"] == []
    assert config["target_parameters"] == ["experts.gate_up_proj", "experts.down_proj", "l.0.mlp.down_proj.weight"]


def test_the_report_of_the_shapes_has_one_row_for_layers_that_are_alike() -> None:
    paths = {f"model.layers.{i}.mlp.up_proj": (8, 12 if i < 30 else 16, 1) for i in range(40)}
    shapes = {"mlp": paths, "unembed": {"lm_head": (8, 300, 1)}}
    report = adapters.rows(shapes)
    assert len(report) == 3
    assert adapters.of_rows(json.loads(json.dumps(report))) == shapes
