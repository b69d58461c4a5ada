"""PEFT files of random adapters, written without PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from app.domain.adapters import CONFIG_FILE, TENSORS_FILE, Shape, tensors

# The configuration that PEFT 0.21 writes, without the modules.
PEFT_CONFIG: Mapping[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "auto_mapping": None,
    "peft_version": "0.21.2",
    "base_model_name_or_path": "/home/somebody/base",
    "revision": None,
    "inference_mode": True,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "o_proj", "up_proj"],
    "exclude_modules": None,
    "lora_dropout": 0.1,
    "fan_in_fan_out": False,
    "bias": "none",
    "use_rslora": False,
    "modules_to_save": None,
    "init_lora_weights": True,
    "rank_pattern": {},
    "alpha_pattern": {},
    "megatron_core": "megatron.core",
    "loftq_config": {},
    "qalora_group_size": 16,
    "use_dora": False,
    "target_parameters": None,
}


def random_tensors(paths: Mapping[str, Shape], rank: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    """The tensors of an adapter, by their names in a PEFT file."""
    generator = np.random.default_rng(0)
    return {name: generator.normal(size=shape).astype(dtype) for name, shape in tensors(paths, rank).items()}


def peft_files(paths: Mapping[str, Shape], rank: int, **config: Any) -> dict[str, bytes]:
    """The two files by name; `config` are further or other fields of the configuration."""
    written = json.dumps({**PEFT_CONFIG, "r": rank, **config}).encode()
    return {CONFIG_FILE: written, TENSORS_FILE: save(random_tensors(paths, rank), {"format": "pt"})}


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder
