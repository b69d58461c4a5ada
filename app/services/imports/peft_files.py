"""Checks the PEFT files of a LoRA adapter that was made elsewhere, against the adapters that its base model can have.

An adapter is a whole number of groups: attn, mlp, unembed. Anything in the files that would change the model's output
and cannot be kept is an error that names it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.domain.adapters import CONFIG_FILE, KEY_PREFIX, TENSORS_FILE, Shape, Shapes, tensors
from app.domain.ops import LoraSpec
from app.errors import BadRequest
from app.services.imports import safetensors
from app.services.validation import GROUPS, in_range
from app.settings import LimitSettings
from app.wire.bodies import parse_json

MOST_CONFIG_BYTES = 2**20
# Fields that do not change the output of the finished adapter; which modules it is on is read from its tensors.
_WITHOUT_EFFECT = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "lora_dropout", "bias", "init_lora_weights", "task_type"),
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "runtime_config"),
        *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("megatron_core", "qalora_group_size", "eva_config"),
    }
)
# The other ways to start an adapter (such as PiSSA) also change the base model's weights.
_STARTS = (True, False, "gaussian", "orthogonal", "eva")
_TASKS = (None, "CAUSAL_LM")
# The path of a pair on a stack of experts: PEFT's wrapper around each tensor lies inside those around the later ones.
_WRAPPER = ".base_layer"
_STACK = re.compile(rf"\.(experts|shared_experts)({re.escape(_WRAPPER)})*$")
# A tensor's entry in the header is its name and less than 200 bytes; the file's own metadata is a few words.
_ENTRY_BYTES, _OTHER_BYTES = 200, 2**16


def read(folder: Path, shapes: Shapes, limits: LimitSettings) -> LoraSpec:
    """The spec of the adapter in `folder`; its seed is 0, as nothing is sampled from it. Raises BadRequest for files
    that hold no plain LoRA adapter of this base model, and TooLarge for a configuration with too many values."""
    config = _config(folder / CONFIG_FILE, limits)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank < 2**31:
        raise BadRequest(f"{CONFIG_FILE}: r is {_short(rank)}; it must be a whole number from 1")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise BadRequest(f"{CONFIG_FILE}: lora_alpha is {_short(alpha)}; it must be a number")
    in_range(f"{CONFIG_FILE}: lora_alpha", alpha, 0, 1e6, open_ends="(")
    groups = _groups(safetensors.read_shapes(folder / TENSORS_FILE, _most_header(shapes)), shapes, rank)
    attn, mlp, unembed = (group in groups for group in GROUPS)
    return LoraSpec(rank, attn, mlp, unembed, alpha=float(alpha))


def config_of(spec: LoraSpec, base_model: str, shapes: Shapes) -> bytes:
    """The configuration of such an adapter as the server keeps it: it names every module in full.

    Beside experts, PEFT adapts MLPs as tensors too: named as modules, it takes them for experts of an older layout.
    """
    paths = {group: [*shapes.get(group, {})] for group in GROUPS if getattr(spec, f"train_{group}")}
    stacked = _stacked(shapes["mlp"]) if paths.get("mlp") else {}
    as_tensors = [path for path in paths.pop("mlp") if path not in stacked] if stacked else []
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted(path for found in paths.values() for path in found),
    }
    if stacked:
        config["target_parameters"] = [*dict.fromkeys(stacked.values()), *(f"{path}.weight" for path in as_tensors)]
    return json.dumps(config, indent=2).encode()


def _stacked(paths: Mapping[str, Shape]) -> dict[str, str]:
    """The tensors of experts that `paths` lead to, as PEFT's `target_parameters` names them, by path."""
    found = {path: match for path in paths if (match := _STACK.search(path))}
    return {path: f"{match[1]}.{_tensor(paths, path)}" for path, match in found.items()}


def _tensor(paths: Mapping[str, Shape], path: str) -> str:
    """The name of the tensor of experts under a pair. A module has gate_proj, up_proj and down_proj, or either of
    gate_up_proj and up_proj, with down_proj. A gate_up_proj has twice the numbers of its down_proj."""
    module = path.replace(_WRAPPER, "")
    match path.count(_WRAPPER):
        case 0:
            return "down_proj"
        case 1 if math.prod(paths[path]) == 2 * math.prod(paths[module]):
            return "gate_up_proj"
        case 1:
            return "up_proj"
        case _:
            return "gate_proj"


def most_bytes(shapes: Shapes, spec: LoraSpec) -> int:
    """The greatest size of the file with the tensors of such an adapter, which are fp32 at most."""
    asked = [tensors(paths, spec.rank) for group, paths in shapes.items() if getattr(spec, f"train_{group}")]
    return _most_header(shapes) + sum(4 * math.prod(shape) for found in asked for shape in found.values())


def _most_header(shapes: Shapes) -> int:
    """The greatest size of the header of an adapter's file."""
    return _OTHER_BYTES + sum(len(name) + _ENTRY_BYTES for paths in shapes.values() for name in tensors(paths, 1))


def _config(file: Path, limits: LimitSettings) -> Mapping[str, Any]:
    """The configuration. Raises BadRequest for a field that changes the output and cannot be kept."""
    if file.stat().st_size > MOST_CONFIG_BYTES:
        raise BadRequest(f"{CONFIG_FILE} has {file.stat().st_size} bytes; at most {MOST_CONFIG_BYTES} are allowed")
    try:
        config = parse_json(file.read_bytes(), limits)
    except (BadRequest, RecursionError) as error:
        raise BadRequest(f"{CONFIG_FILE}: {error}") from None
    if not isinstance(config, dict):
        raise BadRequest(f"{CONFIG_FILE} is not a JSON object")
    _check_one_of(config, "peft_type", ("LORA",))
    _check_one_of(config, "task_type", _TASKS)
    _check_one_of(config, "bias", ("none", None))
    if config.get("init_lora_weights", True) not in _STARTS:
        _check_one_of(config, "init_lora_weights", _STARTS)
    for name, value in config.items():
        if name not in _WITHOUT_EFFECT and value not in (None, False, [], {}):
            raise BadRequest(
                f"{CONFIG_FILE}: {name[:80]} is {_short(value)}; only plain LoRA is accepted, without {name[:80]}"
            )
    return config


def _check_one_of(config: Mapping[str, Any], name: str, allowed: tuple[Any, ...]) -> None:
    if config.get(name) not in allowed:
        words = " or ".join(json.dumps(value) for value in allowed)
        raise BadRequest(f"{CONFIG_FILE}: {name} is {_short(config.get(name))}; it must be {words}")


def _groups(found: Mapping[str, tuple[int, ...]], shapes: Shapes, rank: int) -> set[str]:
    """The groups that the tensors cover. Raises BadRequest unless they are exactly the tensors of whole groups."""
    by_group = {group: tensors(paths, rank) for group, paths in shapes.items()}
    groups = {group for group, wanted in by_group.items() if wanted.keys() & found.keys()}
    wanted = {name: shape for group in groups for name, shape in by_group[group].items()}
    if unknown := sorted(found.keys() - wanted.keys()):
        raise BadRequest(f"{TENSORS_FILE}: {_unknown(unknown[0])}")
    if not found:
        raise BadRequest(f"{TENSORS_FILE} holds no tensors")
    if missing := sorted(wanted.keys() - found.keys()):
        group = next(group for group in groups if missing[0] in by_group[group])
        raise BadRequest(
            f"{TENSORS_FILE}: {missing[0]} is missing; an adapter has a pair on every module of a group, and this one "
            f"has only some of the group {group}"
        )
    for name, shape in found.items():
        if shape != wanted[name]:
            raise BadRequest(
                f"{TENSORS_FILE}: {name} has the shape {list(shape)}, but with r {rank} this base model needs "
                f"{list(wanted[name])}"
            )
    return groups


def _unknown(name: str) -> str:
    text = f"{name[:200]!r} belongs to no adapter of this base model"
    if name.startswith(KEY_PREFIX) and ".lora_" not in name:
        return f"{text}: it is a weight of the base model; save the adapter with save_embedding_layers=False"
    return text


def _short(value: Any) -> str:
    return f"{value!r:.80}"
