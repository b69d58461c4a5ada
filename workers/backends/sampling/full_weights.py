"""Reads all weights of a model from a folder that a trainer wrote (workers/checkpoints/export.py), for a sampler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from app.errors import UserOpError
from workers.models import base_model


def check_fits(folder: Path, model: Any) -> None:
    """Raises UserOpError unless the folder's model has the same parameters as `model`."""
    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            stored = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise UserOpError(f"{folder.name} holds no model that can be loaded: {error}") from None
    if _shapes(stored) != _shapes(model) or not _files(folder):
        raise UserOpError(f"{folder.name} holds no weights of this base model")


def tensors_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor by its name in the files, on the CPU; one at a time is in memory."""
    for path in _files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a handle of safetensors is no dict
                yield name, file.get_tensor(name)


def weights_for(model: Any, folder: Path) -> Iterable[tuple[str, Tensor]]:
    """Returns tensors by their names in a transformers model: one by one, or all at once where the files' names differ.

    The names differ for experts, which are one tensor only in memory. Raises UserOpError when some are missing.
    """
    wanted = dict(model.named_parameters()).keys()
    if wanted <= _names_in(folder):
        return ((name, tensor) for name, tensor in tensors_in(folder) if name in wanted)
    try:
        return base_model.read_weights(str(folder), model).items()
    except (OSError, ValueError) as error:
        raise UserOpError(f"{folder.name} holds no weights of this base model: {error}") from None


def _files(folder: Path) -> list[Path]:
    """Lists the weight files. In a training checkpoint the optimizer's tensors lie beside them."""
    return sorted(folder.glob("model*.safetensors"))


def _names_in(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in _files(folder):
        with safe_open(path, framework="pt") as file:
            names.update(file.keys())
    return names


def _shapes(model: Any) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}
