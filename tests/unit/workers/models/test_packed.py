"""Base models as they are published in 4 or 8 bits: their weights are unpacked when the model is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.errors import SetupError, UnservableModel
from app.settings import BaseModelSettings
from tests import packed_checkpoints
from tests.parity import architectures
from tests.unit.workers.models.test_loading import load_split
from workers.models import base_model, full_weights

FORMATS = [
    ("gpt-oss", packed_checkpoints.mxfp4),
    ("deepseek-v3", packed_checkpoints.fp8),
    ("ministral3", packed_checkpoints.fp8_tensor),
    ("deepseek-v3", packed_checkpoints.int4),
    ("deepseek-v3", packed_checkpoints.nvfp4),
]
Pack = Callable[[Path], dict[str, Tensor]]


def settings(folder: Path, dtype: str = "float32") -> BaseModelSettings:
    return BaseModelSettings(name="packed", path=str(folder), dtype=dtype)


def build(case: str, pack: Pack, folder: Path) -> tuple[Path, Path]:
    """Returns the folders of a packed model and of its numbers as a plain model."""
    plain = architectures.build(case, folder / "plain")
    made = Path(shutil.copytree(plain, folder / "packed"))
    numbers = pack(made)
    tensors = load_file(plain / "model.safetensors")
    assert numbers.keys() < tensors.keys()
    whole = {name: tensor.contiguous() for name, tensor in {**tensors, **numbers}.items()}
    save_file(whole, plain / "model.safetensors", metadata={"format": "pt"})
    return made, plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("case", "pack"), FORMATS)
def test_a_packed_model_is_the_plain_model_of_its_numbers(case: str, pack: Pack, dtype: str, tmp_path: Path) -> None:
    made, plain = build(case, pack, tmp_path)
    model, wanted = (base_model.load(settings(folder, dtype)).model for folder in (made, plain))
    assert_same(dict(model.named_parameters()), dict(wanted.named_parameters()))
    assert model.dtype == wanted.dtype
    assert not hasattr(model.config, "quantization_config"), "a merged model is saved as plain tensors"


@pytest.mark.parametrize(("case", "pack"), FORMATS)
def test_full_fine_tuning_starts_from_its_numbers_in_fp32(case: str, pack: Pack, tmp_path: Path) -> None:
    made, plain = build(case, pack, tmp_path)
    model = base_model.load(settings(made, "bfloat16")).model
    assert_same(base_model.read_weights(str(made), model), base_model.read_weights(str(plain), model))


@pytest.mark.parametrize(("case", "pack"), FORMATS)
def test_it_is_written_as_a_plain_model_for_engines_that_would_compute_otherwise(
    case: str, pack: Pack, tmp_path: Path
) -> None:
    made, plain = build(case, pack, tmp_path)
    (made / "generation_config.json").write_text('{"eos_token_id": [7]}')
    (tmp_path / "written").mkdir()
    full_weights.write_dequantized(settings(made), "float32", tmp_path / "written")
    found, wanted = (base_model.load(settings(folder)).model for folder in (tmp_path / "written", plain))
    assert_same(dict(found.named_parameters()), dict(wanted.named_parameters()))
    assert "quantization_config" not in json.loads((tmp_path / "written/config.json").read_text())
    assert json.loads((tmp_path / "written/generation_config.json").read_text())["eos_token_id"] == [7]


def test_it_is_unpacked_in_host_memory_where_there_is_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plain weights may be too large for one. torch's CPU build fails when anything moves to a GPU."""
    made, plain = build(*FORMATS[0], tmp_path)
    (tmp_path / "written").mkdir()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    full_weights.write_dequantized(settings(made), "bfloat16", tmp_path / "written")
    monkeypatch.undo()
    found, wanted = (base_model.load(settings(folder, "bfloat16")).model for folder in (tmp_path / "written", plain))
    assert_same(dict(found.named_parameters()), dict(wanted.named_parameters()))


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_model_of_several_files_is_read_whole(tmp_path: Path) -> None:
    made, plain = build("deepseek-v3", packed_checkpoints.fp8, tmp_path)
    tensors = load_file(made / "model.safetensors")
    parts = {f"part-{n}.safetensors": sorted(tensors)[n::2] for n in range(2)}  # scales lie apart from their codes
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, made / file, metadata={"format": "pt"})
    places = {name: file for file, names in parts.items() for name in names}
    (made / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (made / "model.safetensors").unlink()
    found, wanted = (base_model.load(settings(folder)).model for folder in (made, plain))
    assert_same(dict(found.named_parameters()), dict(wanted.named_parameters()))


def test_kimi_k2_is_read_as_it_is_published(tmp_path: Path) -> None:
    """With a type and code of its own, which is DeepSeek-V3's and is not run."""
    made, plain = build("deepseek-v3", packed_checkpoints.fp8, tmp_path)
    config = json.loads((made / "config.json").read_text())
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModel": "modeling_deepseek.DeepseekV3Model"}
    (made / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2", "auto_map": code}))
    base_model.check_adaptable(settings(made))
    found, wanted = (base_model.load(settings(folder)).model for folder in (made, plain))
    assert_same(dict(found.named_parameters()), dict(wanted.named_parameters()))
    assert_same(base_model.read_weights(str(made), found), base_model.read_weights(str(plain), wanted))
    (tmp_path / "written").mkdir()
    full_weights.write_dequantized(settings(made), "float32", tmp_path / "written")
    written = json.loads((tmp_path / "written/config.json").read_text())
    assert written["model_type"] == "deepseek_v3" and "auto_map" not in written


@pytest.mark.parametrize("load", [base_model.load, load_split])
def test_codes_without_a_word_in_the_configuration_are_refused(load: Any, tmp_path: Path) -> None:
    made, _ = build("deepseek-v3", packed_checkpoints.fp8, tmp_path)
    config = json.loads((made / "config.json").read_text())
    del config["quantization_config"]
    (made / "config.json").write_text(json.dumps(config))
    with pytest.raises(SetupError, match=r"weight_scale_inv scales a packed weight, but .* no quantization_config"):
        load(settings(made))


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
INT8 = {"group_0": {"weights": {"num_bits": 8, "type": "int", "symmetric": True}}}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (MODELOPT, "modelopt NVFP4"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": INT8}, "pack-quantized"),
    ],
)
@pytest.mark.parametrize("case", ["qwen3", "qwen3.5, vision"])
def test_another_format_is_refused_at_the_start_in_one_line(
    case: str, given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = architectures.build(case, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (config if case == "qwen3" else config["text_config"])["quantization_config"] = given
    (folder / "config.json").write_text(json.dumps(config))
    for start in (base_model.load, base_model.check_adaptable, base_model.skeleton):
        with pytest.raises(UnservableModel, match=rf"'packed' is published with .*{said}.* give a bf16 copy") as error:
            start(settings(folder))
        assert "\n" not in str(error.value)


def test_codes_that_the_format_does_not_explain_are_refused(tmp_path: Path) -> None:
    """Else they would be taken for numbers."""
    made, _ = build("deepseek-v3", packed_checkpoints.fp8, tmp_path)
    tensors = load_file(made / "model.safetensors")
    name = min(name for name in tensors if name.endswith("_scale_inv"))
    del tensors[name]
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnservableModel, match=name.removesuffix("_scale_inv")):
        base_model.load(settings(made))
