"""A folder is taken if it has all weights of the base model, in plain safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from app.domain.records import WEIGHTS_INDEX_FILE
from app.errors import BadRequest
from app.services.imports.full_weights import read
from app.settings import LimitSettings

ARCH = "Qwen3ForCausalLM"
SHAPES = {"embed.weight": (6, 4), "layers.0.up.weight": (8, 4), "layers.0.mlp.experts.gate_up_proj": (2, 4, 4)}
LIMITS = LimitSettings()


def write(folder: Path, *files: dict[str, tuple[int, ...]], index: bool = True, **config: Any) -> Path:
    """A checkpoint whose weights are in one file, or in several with an index."""
    names = ["model.safetensors"] if len(files) == 1 else [f"model-{i}.safetensors" for i in range(len(files))]
    for name, shapes in zip(names, files, strict=True):
        save_file({key: np.zeros(shape, "float16") for key, shape in shapes.items()}, folder / name)
    if len(files) > 1 and index:
        named = {key: name for name, shapes in zip(names, files, strict=True) for key in shapes}
        (folder / WEIGHTS_INDEX_FILE).write_text(json.dumps({"weight_map": named}))
    (folder / "config.json").write_text(json.dumps({"architectures": [ARCH], **config}))
    return folder


IN_FILES = {**SHAPES, "layers.0.mlp.experts.0.gate_proj.weight": (2, 4), "lm_head.weight": (6, 4)}
del IN_FILES["layers.0.mlp.experts.gate_up_proj"]


def test_its_files_are_the_weights_and_what_belongs_to_them(tmp_path: Path) -> None:
    write(tmp_path, IN_FILES)
    for name in ("tokenizer.json", "generation_config.json", "README.md", "pytorch_model.bin", "optimizer.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
    found = read(tmp_path, ARCH, SHAPES, LIMITS)
    assert set(found) == {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"}
    assert found["config.json"] == tmp_path / "config.json"


def test_weights_may_be_in_several_files(tmp_path: Path) -> None:
    first, *rest = IN_FILES.items()
    write(tmp_path, dict([first]), dict(rest))
    assert set(read(tmp_path, ARCH, SHAPES, LIMITS)) == {
        "config.json", WEIGHTS_INDEX_FILE, "model-0.safetensors", "model-1.safetensors",
    }  # fmt: skip


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another class": (lambda folder: write(folder, IN_FILES, architectures=["LlamaForCausalLM"]), "LlamaForCausalLM"),
    "quantized": (lambda folder: write(folder, IN_FILES, quantization_config={"a": 1}), "quantization_config"),
    "another size": (lambda folder: write(folder, {**IN_FILES, "embed.weight": (7, 4)}), r"embed.weight.*\[7, 4\]"),
    "a tensor less": (lambda folder: write(folder, {"embed.weight": (6, 4)}), "layers.0.up.weight is missing"),
    "no index": (lambda folder: write(folder, IN_FILES, {"x": (1,)}, index=False), "neither model.safetensors nor"),
    "nothing": (lambda folder: None, "no config.json"),
    "a configuration that is none": (lambda folder: (folder / "config.json").write_text("[]"), "is not a JSON object"),
    "a damaged file": (
        lambda folder: (write(folder, IN_FILES) / "model.safetensors").write_bytes(b"x" * 20),
        "not a valid safetensors file",
    ),
    "a file less": (
        lambda folder: (write(folder, IN_FILES, {"x": (1,)}) / "model-1.safetensors").unlink(),
        "names model-0.safetensors, model-1.safetensors",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_any_other_folder_is_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    spoil, words = WRONG[case]
    spoil(tmp_path)
    with pytest.raises(BadRequest, match=words):
        read(tmp_path, ARCH, SHAPES, LIMITS)
