"""Loading a base model with transformers: the same for a trainer and for the transformers sampler."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from app.domain.base_models import BaseModelInfo
from app.errors import SetupError
from app.settings import BaseModelSettings
from workers.loading import explained, local_path
from workers.lora import targets
from workers.training.memory import ran_out_of_memory


@dataclass(frozen=True, slots=True)
class LoadedBase:
    """`model` (a transformers PreTrainedModel) is frozen, until someone trains it, and in eval mode.

    `tokenizer` is the path or hub id its tokenizer loads from.
    """

    model: Any
    tokenizer: str
    info: BaseModelInfo
    device: torch.device
    dtype: torch.dtype


def load(settings: BaseModelSettings, device: torch.device | None = None) -> LoadedBase:
    """Load a local folder or a hub id onto `device` (default: the first GPU, else the CPU).

    Only safetensors files are read and no code of the model's repository is run. Raises SetupError when the path is
    missing or cannot be loaded, or max_context is over the model's own.
    """
    device = device or torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    dtype = choose_dtype(settings.dtype, device)
    with explained(settings):
        model = _from_pretrained(settings, dtype)
    model = model.to(device)
    model.eval().requires_grad_(False)
    return LoadedBase(model, settings.tokenizer or settings.path, describe(settings, model, dtype), device, dtype)


def read_weights(source: str, model: Any) -> dict[str, Tensor]:
    """All parameters of a model like `model`, by name, as a folder or hub id holds them: fp32, on the CPU.

    Raises ValueError or OSError when files are missing or damaged, or hold a model of other shapes.
    """
    try:
        found, report = type(model).from_pretrained(
            local_path(source),
            config=deepcopy(model.config),
            dtype=torch.float32,
            attn_implementation="eager",
            use_safetensors=True,
            output_loading_info=True,
        )
    except (RuntimeError, SafetensorError) as error:
        if ran_out_of_memory(error):
            raise
        raise ValueError(str(error)) from None
    if report["missing_keys"]:
        raise ValueError(f"{min(report['missing_keys'])} is missing")
    return {name: parameter.detach() for name, parameter in found.named_parameters()}


def read_config(settings: BaseModelSettings) -> Any:
    """The model's transformers config. Without `trust_remote_code` given, transformers would ask on the terminal."""
    return AutoConfig.from_pretrained(local_path(settings.path), trust_remote_code=False)


def check_weights(settings: BaseModelSettings) -> None:
    """Raises SetupError when files of a local folder are missing or cut off. What loads them later need not say so."""
    folder = Path(local_path(settings.path))
    if folder.is_dir():
        with explained(settings):
            for name in _weight_files(folder):
                with safe_open(folder / name, "pt"):
                    pass


def _weight_files(folder: Path) -> set[str]:
    index = folder / "model.safetensors.index.json"
    return set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}


def _from_pretrained(settings: BaseModelSettings, dtype: torch.dtype) -> nn.Module:
    transformers_logging.disable_progress_bar()
    config = read_config(settings)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        local_path(settings.path),
        config=config,
        dtype=dtype,
        attn_implementation=_attention(config),
        use_safetensors=True,
        trust_remote_code=False,
    )
    return model


def _attention(config: Any) -> str:
    """transformers' SDPA leaves out Gemma 2's cap on attention scores without a word."""
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else "sdpa"


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype a setting of that name means on `device`."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or _cpu_is_fast_at_bfloat16() else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def _cpu_is_fast_at_bfloat16() -> bool:
    """On SmolLM2-135M bf16 is 1.5x to 3.6x as fast as fp32 with these instructions, and far slower without."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def describe(settings: BaseModelSettings, model: nn.Module, dtype: torch.dtype) -> BaseModelInfo:
    """What the API needs to know of `model`. Raises SetupError when max_context is over the model's own."""
    config: Any = model.config
    if not config.architectures:
        raise SetupError(f"base model {settings.name!r}: its config.json names no architectures; add them")
    text = config.get_text_config()
    own = text.max_position_embeddings
    if settings.max_context > own:
        raise SetupError(
            f"base model {settings.name!r}: max_context {settings.max_context} is over the model's own {own}; lower it"
        )
    return BaseModelInfo(
        name=settings.name,
        arch=config.architectures[0],
        vocab_size=text.vocab_size,
        max_context=settings.max_context or own,
        dtype=str(dtype).removeprefix("torch."),
        trainable_groups=tuple(group for group, paths in targets(model).items() if paths),
    )
