"""Maps every weight of a base model to a LoRA group, or to the reason why it never has an adapter.

A model with any other weight is refused for LoRA: an adapter would silently leave it out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import cast

from torch import nn

GROUPS: dict[str, tuple[str, ...]] = {
    "attn": (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        "r_proj",  # Inkling's relative bias
        # DeepSeek's latent attention
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
        "qkv_proj",
        # Gated DeltaNet; its out_proj is decided by path, since other models use that name too
        *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "linear_attn.out_proj"),
        "mixer.in_proj",  # Nemotron-H's Mamba
        *("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "self_attn.b_proj"),  # Kimi's delta attention
    ),
    "mlp": (
        *("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
        *("fc1_latent_proj", "fc2_latent_proj"),  # around Nemotron-H's experts
    ),
    "unembed": ("lm_head",),
}
_OTHER_INPUTS = (
    r"(^|\.)(visual|vision_\w+|audio_\w+|multi_modal_projector|embed_vision|embed_audio)(\.|$)",
    "training gives text alone, so no gradient reaches it",
)
_EXPERTS = (r"\.experts(\.|$)", "experts in a layout that Tinsmith does not know have no adapter")
# A path's pattern, and why no adapter ever sits there. The first that matches counts, before any group.
NEVER: tuple[tuple[str, str], ...] = (
    _OTHER_INPUTS,
    _EXPERTS,
    (r"\.(gate|router|shared_expert_gate)(\.|$)", "a router chooses experts, and stays as it was pretrained"),
    (r"\.indexer(\.|$)", "an indexer chooses tokens to attend to, and that choice has no gradient"),
    (r"(^|\.)mtp(\.|$)", "a multi-token-prediction head drafts tokens, and the loss never reads it"),
    (r"\.mixer\.out_proj$", "Mamba's fused kernel reads this weight past its module, where PEFT refuses an adapter"),
    (r"(^|\.)per_layer_\w+$", "Gemma 4's embeddings of each layer stay as pretrained, as does what mixes them in"),
    (r"\.A_log$", "a decay rate has one number for each head, and is not a linear layer"),
    (r"\.conv1d(\.|$)", "a convolution over neighbouring tokens has few weights, and is not a linear layer"),
    (r"\.rel_logits_proj(\.|$)", "a table of biases by distance has few weights, and is not a linear layer"),
)


def groups(paths: list[str], *, experts: bool) -> dict[str, list[str]]:
    """The paths of linears that an adapter can sit on, by group. With `experts`, which get no adapter, `mlp` is empty:
    the few dense MLPs beside them would make a thin adapter."""
    found: dict[str, list[str]] = {group: [] for group in GROUPS}
    for path in paths:
        group = _group(path)
        if group is not None and not (experts and group == "mlp"):
            found[group].append(path)
    return found


def is_mlp(path: str) -> bool:
    """True for the path of a linear of the mlp group."""
    return _group(path) == "mlp"


def in_language_model(path: str) -> bool:
    """True if the module at `path` is no part of a vision or audio tower."""
    return not _matches(_OTHER_INPUTS, path)


def trains_experts(path: str) -> bool:
    """True if the experts at `path` are routed ones of the language model."""
    return re.search(_EXPERTS[0], path) is not None and in_language_model(path)


def has_experts(model: nn.Module) -> bool:
    """True if the model's language model has experts."""
    return any(trains_experts(name) for name, _ in model.named_modules())


def undecided(model: nn.Module, adapted: Collection[str]) -> list[str]:
    """The weights of a bare model that are in no group and not in NEVER, each pattern once, such as `layers.*.foo`.
    `adapted`: the stacked experts that adapters cover."""
    found = {
        path
        for path, covered in _weights(model, adapted)
        if not covered and not any(_matches(entry, path) for entry in NEVER)
    }
    return sorted({_numberless(path) for path in found})


def left_out(model: nn.Module, adapted: Collection[str]) -> dict[str, str]:
    """The reason why no adapter covers a module, for each such module; its layers' numbers are written as `*`.
    `adapted`: the stacked experts that adapters cover."""
    found: dict[str, str] = {}
    for path, _ in _weights(model, adapted):
        entry = next((entry for entry in NEVER if _matches(entry, path)), None)
        if entry is not None:
            end = cast(re.Match[str], re.search(entry[0], path)).end()
            found[_numberless(path[:end].removesuffix("."))] = entry[1]
    return found


def _group(path: str) -> str | None:
    if any(_matches(entry, path) for entry in NEVER):
        return None
    return next((group for group, names in GROUPS.items() if any(f".{path}".endswith(f".{n}") for n in names)), None)


def _numberless(path: str) -> str:
    return re.sub(r"\.[0-9]+(?=\.|$)", ".*", path)


def _matches(entry: tuple[str, str], path: str) -> bool:
    return re.search(entry[0], path) is not None


def _weights(model: nn.Module, adapted: Collection[str]) -> Iterator[tuple[str, bool]]:
    """The paths of all linears, and of other parameters of two or more dimensions, apart from embeddings and the
    stacked experts that are `adapted`; and if they are linears of a group."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield path, _group(path) is not None
        elif not isinstance(module, nn.Embedding) and path not in adapted:
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim > 1:
                    yield f"{path}.{name}", False
