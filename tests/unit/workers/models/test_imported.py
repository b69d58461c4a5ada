"""An adapter's files pass the API's checks, made from the shapes that a trainer reports, and load as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from app.domain import adapters
from app.domain.ops import LoraSpec
from app.errors import BadRequest
from app.services.imports import peft_files as imports
from app.settings import BaseModelSettings, LimitSettings
from tests.models import tiny_qwen3
from tests.parity import architectures
from tests.unit.workers.models.test_target_modules import SHAPE, on_meta
from workers.models import lora, peft_files
from workers.models.base_model import auto_class, check_adaptable

LIMITS = LimitSettings()
DENSE_AND_EXPERTS = {**SHAPE, "first_k_dense_replace": 1}


def reported(model: object) -> adapters.Shapes:
    return adapters.of_rows(json.loads(json.dumps(adapters.rows(lora.shapes(model)))))  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3_5Text", "Glm4Moe", "GptOss"])
@pytest.mark.parametrize("spec", [LoraSpec(4), LoraSpec(3, train_mlp=False, alpha=5.0)], ids=["all", "without-mlp"])
def test_an_export_is_taken_as_the_adapter_that_it_is(tmp_path: Path, family: str, spec: LoraSpec) -> None:
    model = on_meta(family, **(DENSE_AND_EXPERTS if family == "Glm4Moe" else SHAPE))
    peft_files.write(lora.new_adapter(model, spec), tmp_path, "org/base", model)
    shapes = reported(model)
    assert imports.read(tmp_path, shapes, LIMITS) == spec
    assert (tmp_path / adapters.TENSORS_FILE).stat().st_size <= imports.most_bytes(shapes, spec)
    (tmp_path / adapters.CONFIG_FILE).write_bytes(imports.config_of(spec, "org/base", shapes))
    adapter = peft_files.read(tmp_path)
    lora.check_fits(adapter, model)
    assert adapter.spec == spec


STACKED = ["qwen3-moe", "glm4-moe", "gpt-oss", "llama4", "nemotron-h", "nemotron-h, latent", "inkling"]


@pytest.mark.parametrize("case", STACKED)
def test_the_kept_configuration_names_a_familys_experts_as_an_export_does(tmp_path: Path, case: str) -> None:
    """PEFT silently leaves out the pairs of a tensor that it does not find."""
    config = architectures.config_of(case)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    spec = LoraSpec(4)
    peft_files.write(lora.new_adapter(model, spec), tmp_path, "org/base", model)
    written = json.loads((tmp_path / adapters.CONFIG_FILE).read_text())["target_parameters"]
    kept = json.loads(imports.config_of(spec, "org/base", reported(model)))
    assert sorted(kept["target_parameters"]) == sorted(written)
    assert not any("experts" in name.rpartition(".")[2] or "base_layer" in name for name in kept["target_modules"])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny_qwen3(tmp_path / "base")


def peft_adapter(base: Path, folder: Path, **config: object) -> Path:
    """A new adapter as PEFT writes it."""
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM", **config)).save_pretrained(folder)  # type: ignore[arg-type]
    return folder


TARGETS = {
    "names": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "a pattern": r".*\.self_attn\.[qkvo]_proj",
}


@pytest.mark.parametrize("targets", TARGETS)
def test_an_adapter_of_peft_itself_is_taken_by_the_shapes_of_the_base(tmp_path: Path, base: Path, targets: str) -> None:
    folder = peft_adapter(base, tmp_path / "adapter", target_modules=TARGETS[targets], lora_alpha=3)
    shapes = check_adaptable(BaseModelSettings(name="tiny", path=str(base))).shapes
    assert imports.read(folder, shapes, LIMITS) == LoraSpec(2, True, False, False, alpha=3.0)


REFUSED = {
    "use_rslora": {"use_rslora": True},
    "use_dora": {"use_dora": True},
    "rank_pattern": {"rank_pattern": {"q_proj": 4}},
    "lora_bias": {"lora_bias": True},
    "bias": {"bias": "lora_only"},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "init_lora_weights": {"init_lora_weights": "pissa"},
    "k_proj.lora_A.weight is missing": {"target_modules": ["q_proj"]},
    "layers.1.self_attn.k_proj.lora_A.weight is missing": {"layers_to_transform": [0]},
    "save_embedding_layers=False": {"target_modules": ["lm_head"]},
}


@pytest.mark.parametrize("words", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_kept_of_an_adapter_of_peft_is_named(tmp_path: Path, base: Path, words: str) -> None:
    config = {"target_modules": TARGETS["names"], **REFUSED[words]}
    folder = peft_adapter(base, tmp_path / "adapter", **config)
    with pytest.raises(BadRequest) as refused:
        imports.read(folder, check_adaptable(BaseModelSettings(name="tiny", path=str(base))).shapes, LIMITS)
    assert words in str(refused.value)
