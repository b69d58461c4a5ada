"""Loads a base model with transformers, for trainers and the transformers sampler, and describes it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, DeepseekV3Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from app.domain.adapters import Shapes
from app.domain.images import Image
from app.domain.records import WEIGHTS_FILE, WEIGHTS_INDEX_FILE, BaseModelInfo
from app.errors import SetupError, UnservableModel, UserOpError
from app.settings import BaseModelSettings
from workers.backends.failures import ran_out_of_memory
from workers.models import experts, packed
from workers.models.images import ImageReader, reader_of
from workers.models.loading import rope
from workers.models.loading.quantized import QuantizeOnLoad
from workers.models.loading.sharded import ShardOnLoad, Split
from workers.models.loading.source import explained, local_path
from workers.models.lora import shapes, targets
from workers.models.target_modules import has_experts, left_out, undecided

_SCALES = (".weight_scale", ".weight_scale_inv", ".weight_scale_2")


class _KimiK2Config(DeepseekV3Config):  # type: ignore[misc]
    """Reads Kimi-K2, which is published as a type of its own with a copy of DeepSeek-V3's code."""

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **others: Any) -> Any:
        own = {name: value for name, value in config_dict.items() if name not in ("model_type", "auto_map")}
        return DeepseekV3Config.from_dict(own, **others)


CONFIG_MAPPING.register("kimi_k2", _KimiK2Config, exist_ok=True)


@dataclass(frozen=True, slots=True)
class LoadedBase:
    """A loaded base model. `model` (a transformers PreTrainedModel) is frozen, until someone trains it, and in eval
    mode.

    `tokenizer` is the path or hub id its tokenizer loads from. `dtype` is that of activations, and of all weights that
    are not quantised. `images` is None for a model that takes text alone.
    """

    model: Any
    tokenizer: str
    info: BaseModelInfo
    device: torch.device
    dtype: torch.dtype
    images: ImageReader | None

    def check_images(self, found: Sequence[Image], what: str) -> None:
        """Raises UserOpError for images that the model cannot take: see ImageReader.check."""
        if self.images is not None:
            self.images.check(found, what)
        elif found:
            raise UserOpError(f"{self.info.name} is served without images here; send text alone")


def load(settings: BaseModelSettings, device: torch.device | None = None, split: Split | None = None) -> LoadedBase:
    """Loads a local folder or a hub id onto `device`, or the default one.

    With `split`, each parameter is split over ranks when it is read, except as ShardOnLoad says.

    Only safetensors files are read, and no code of the model's repository is run. Raises SetupError when the path is
    missing or cannot be loaded, when max_context is over the model's own, or when other settings do not go with a
    quantised base.
    """
    settings.check_quantized()
    # cuDNN computes convolutions of fp32 in TF32 by default: on an H100, logprobs after an image were 1e-4 away.
    torch.backends.cudnn.allow_tf32 = False
    device = device or default_device()
    dtype = choose_dtype(settings.dtype, device)
    with explained(settings):
        model = _from_pretrained(settings, dtype, _quantizer(settings, dtype, device, split))
        images = reader_of(local_path(settings.path), model)
    model = model.to(device)
    model.eval().requires_grad_(False)
    info = replace(describe(settings, model, dtype), reads_images=images is not None)
    rope.fix_frequencies(model, info.max_context)
    return LoadedBase(model, settings.tokenizer or settings.path, info, device, dtype, images)


def read_weights(source: str, model: Any, kept: Collection[str] | None = None) -> dict[str, Tensor]:
    """Reads all parameters of a model like `model`, by name, from a folder or hub id: fp32, on the CPU.

    Those that are not in `kept`, if it is given, are read one by one and returned empty, unless they are tied.

    Raises ValueError or OSError when files are missing or damaged, or hold a model of other shapes.
    """
    try:
        stored = AutoConfig.from_pretrained(local_path(source), trust_remote_code=False)
        found, report = type(model).from_pretrained(
            **_source(source, stored, source),
            config=deepcopy(model.config),
            dtype=torch.float32,
            attn_implementation="eager",
            use_safetensors=True,
            quantization_config=None if kept is None else ShardOnLoad(_emptied(kept), torch.float32),
            output_loading_info=True,
        )
    except (RuntimeError, SafetensorError) as error:
        if ran_out_of_memory(error):
            raise
        raise ValueError(str(error)) from None
    _check_whole(report)
    return {name: parameter.detach() for name, parameter in found.named_parameters()}


def _emptied(kept: Collection[str]) -> Split:
    def split(name: str, parameter: nn.Parameter) -> None:
        if name not in kept:
            parameter.data = torch.empty(0)

    return split


def read_config(settings: BaseModelSettings) -> Any:
    """Reads the model's transformers config. Raises UnservableModel for a model that is not causal for text."""
    # Without `trust_remote_code`, transformers would ask on the terminal.
    config = AutoConfig.from_pretrained(local_path(settings.path), trust_remote_code=False)
    if getattr(config.get_text_config(), "use_bidirectional_attention", None) in (True, "all"):  # "vision" is causal
        raise not_causal(settings)
    return config


def not_causal(settings: BaseModelSettings) -> UnservableModel:
    why = "attends to later tokens, so it has no next-token logprobs; choose a causal model"
    return UnservableModel(f"base model {settings.name!r} {why}")


def check_weights(settings: BaseModelSettings) -> None:
    """Raises SetupError when files of a local folder are missing or truncated, so that a later load need not check."""
    folder = Path(local_path(settings.path))
    if folder.is_dir():
        with explained(settings):
            for name in _weight_files(folder):
                with safe_open(folder / name, "pt"):
                    pass


def _weight_files(folder: Path) -> set[str]:
    index = folder / WEIGHTS_INDEX_FILE
    return set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {WEIGHTS_FILE}


def _quantizer(settings: BaseModelSettings, dtype: torch.dtype, device: torch.device, split: Split | None) -> Any:
    if settings.quantized:
        return QuantizeOnLoad(settings.dtype, device)
    return None if split is None else ShardOnLoad(split, dtype)


def _from_pretrained(settings: BaseModelSettings, dtype: torch.dtype, quantizer: Any) -> nn.Module:
    transformers_logging.disable_progress_bar()
    config = read_config(settings)
    kind = auto_class(config)
    source = _source(settings.path, config, settings.name)
    if "state_dict" in source:  # the Auto classes take none
        kind = kind._model_mapping[type(config)]
    model, report = kind.from_pretrained(
        **source,
        config=config,
        dtype=dtype,
        attn_implementation=_attention(config),
        use_safetensors=True,
        trust_remote_code=False,
        quantization_config=quantizer,
        output_loading_info=True,
    )
    _check_whole(report)
    _name(model, settings.path)
    return model  # type: ignore[no-any-return]


def _check_whole(report: Mapping[str, Any]) -> None:
    """Raises ValueError for weights that are not in the files: transformers makes random ones. Also for scales that are
    left over: their weights were read as if they needed none."""
    if report["missing_keys"]:
        raise ValueError(f"{min(report['missing_keys'])} is missing")
    if scales := [name for name in report["unexpected_keys"] if name.endswith(_SCALES)]:
        raise ValueError(f"{min(scales)} scales a packed weight, but its config.json has no quantization_config")


def _source(path: str, config: Any, name: str) -> dict[str, Any]:
    """The arguments of from_pretrained that say where the weights come from. `config` becomes that of a plain model,
    because adapters sit on plain tensors."""
    form = packed.format_of(config, name)
    if form is None:
        return {"pretrained_model_name_or_path": local_path(path)}
    packed.forget(config)
    return {"pretrained_model_name_or_path": None, "state_dict": packed.tensors(local_path(path), form, name)}


def _name(model: Any, path: str) -> None:
    """Notes where the model comes from. transformers does not when it gets tensors."""
    model.name_or_path = model.config.name_or_path = local_path(path)


def auto_class(config: Any) -> Any:
    """The transformers class that loads the model whole: a model that also reads images keeps its published layout."""
    reads_images = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def _attention(config: Any) -> str:
    """The attention implementation: SDPA, except for classes without it (GPT-OSS, whose attention has sinks) and for
    Gemma 2's cap on attention scores, which transformers' SDPA silently leaves out."""
    classes = auto_class(config)._model_mapping
    has_sdpa = type(config) not in classes or classes[type(config)]._supports_sdpa
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return "sdpa" if has_sdpa and not capped else "eager"


def default_device() -> torch.device:
    """The first GPU, else the CPU."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of computation that a setting of this name means on `device`; with quantised weights, that of auto."""
    if name in ("float32", "bfloat16"):
        return torch.bfloat16 if name == "bfloat16" else torch.float32
    return torch.bfloat16 if device.type == "cuda" or _cpu_is_fast_at_bfloat16() else torch.float32


def _cpu_is_fast_at_bfloat16() -> bool:
    """True if the CPU has bf16 instructions. With them, bf16 is 1.5x to 3.6x as fast as fp32 on SmolLM2-135M; without
    them it is far slower."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def describe(settings: BaseModelSettings, model: nn.Module, dtype: torch.dtype) -> BaseModelInfo:
    """The description of `model` for the API. Raises SetupError when max_context is over the model's own."""
    config: Any = model.config
    if not config.architectures:
        raise SetupError(f"base model {settings.name!r}: its config.json names no architectures; add them")
    text = config.get_text_config()
    own = text.max_position_embeddings
    if settings.max_context > own:
        raise SetupError(
            f"base model {settings.name!r}: max_context {settings.max_context} is greater than the model's own {own}; "
            "lower it"
        )
    return BaseModelInfo(
        name=settings.name,
        arch=config.architectures[0],
        vocab_size=getattr(text, "unpadded_vocab_size", None) or text.vocab_size,
        max_context=settings.max_context or own,
        dtype=settings.dtype if settings.quantized else str(dtype).removeprefix("torch."),
        trainable_groups=tuple(group for group, paths in targets(model).items() if paths),
    )


def skeleton(settings: BaseModelSettings) -> Any:
    """Builds the model without its weights.

    Raises SetupError when there is no such model, or files of it are missing, and UnservableModel for packed weights
    that are not read.
    """
    with explained(settings), torch.device("meta"):
        config = read_config(settings)
        packed.format_of(config, settings.name)
        model = auto_class(config).from_config(config, trust_remote_code=False)
    check_weights(settings)
    return model


@dataclass(frozen=True, slots=True)
class Adaptable:
    """The modules that no LoRA adapter ever covers, with the reasons; and the shapes of the pairs on all others."""

    never: Mapping[str, str]
    shapes: Shapes


def check_adaptable(settings: BaseModelSettings) -> Adaptable:
    """The parts of the base model that LoRA adapters cover.

    Raises UnservableModel when the model has weights that nobody has decided about. Full fine-tuning trains them all,
    and needs no such decision. Also raises UnservableModel when the model's experts cannot be quantised, but are to be.
    Raises SetupError as `skeleton` does.
    """
    model = skeleton(settings)
    adapted = experts.found(model)
    if unknown := undecided(model, adapted):
        raise UnservableModel(
            f"base model {settings.name!r} ({model.config.architectures[0]}) cannot be trained with LoRA: it has "
            f"modules that Tinsmith does not know: {', '.join(unknown)}"
        )
    if settings.quantized and has_experts(model) and not adapted:
        raise UnservableModel(
            f"base model {settings.name!r} ({model.config.architectures[0]}) cannot have dtype {settings.dtype!r}: its "
            "experts, which are most of its weights, have a layout that is not quantised; set dtype to auto"
        )
    return Adaptable(left_out(model, adapted), shapes(model))
