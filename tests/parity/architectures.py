"""Tiny random models of every architecture that training is tested on: two layers of width 64, vocab 320, fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models import VOCAB_SIZE

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
_WINDOW = 8
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
_GEMMA = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}
_GRANITE = {
    "logits_scaling": 3.0,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 4.0,
    "residual_multiplier": 0.5,
}
_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_TOWER = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
_SIGLIP = {**_TOWER, "image_size": 56, "patch_size": 14}
_PIXTRAL = {**_TOWER, "model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 16}
_MISTRAL = {"model_type": "mistral", "sliding_window": _WINDOW}
_GEMMA3 = {"sliding_window": _WINDOW, "query_pre_attn_scalar": 16}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
_LATENT = {
    **_ROUTED,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
# Each token sees at most 8.
_INDEXER = {"index_topk": _WINDOW, "index_head_dim": 16}
_KIMI = {
    "pad_token_id": 0,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
}
_SMOLLM3 = {"pad_token_id": 0, "no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": _WINDOW}
# A layer with rope, which attends within chunks, and one without, whose temperature grows from the 8th token on.
_LLAMA4 = {
    "num_local_experts": 4,
    "intermediate_size_mlp": 96,
    "pad_token_id": 0,
    "attention_chunk_size": 16,
    "no_rope_layers": [1, 0],
    "floor_scale": 8,
}
# Queries grow with each 8 tokens of the position.
_MINISTRAL3 = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.1,
}
_GEMMA4 = {
    "sliding_window": _WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 0,
}
_GEMMA4_VISION = {**_TOWER, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64}
_NEMOTRON = {
    **_ROUTED,
    "layer_types": ["mamba", "attention", "moe"],
    "moe_shared_expert_intermediate_size": 48,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "pad_token_id": 0,
}

_NEMOTRON_LATENT = {"layer_types": ["attention", "moe", "mlp"], "moe_latent_size": 24}
# A layer with a window and a dense MLP, and one without, whose temperature grows from the 6th token on and whose
# relative bias ends at the 12th. 16 rows of the head are padding.
_INKLING = {
    **{name: _ROUTED[name] for name in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")},
    "vocab_size": VOCAB_SIZE + 16,
    "unpadded_vocab_size": VOCAB_SIZE,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "mlp_layer_types": ["dense", "sparse"],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 8,
    "sliding_window_size": _WINDOW,
    "d_rel": 4,
    "rel_extent": 12,
    "log_scaling_n_floor": 6,
    "route_scale": 2.0,
    "logits_mup_width_multiplier": 3.0,
}
_INKLING_TOWERS = {
    "vision_config": {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "patch_size": 4},
    "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8},
}

# transformers' name of the configuration without "Config", and the fields that make it differ from its neighbours.
# "(unlisted)": workers/backends/training/architectures.py does not list it, so it is padded and its logits are whole.
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied head": ("Llama", {"tie_word_embeddings": True}),
    "mistral, window": ("Mistral", {"sliding_window": _WINDOW}),
    "qwen2": ("Qwen2", {}),
    "qwen2, window": ("Qwen2", {"use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {}),
    "qwen3-moe": ("Qwen3Moe", _MOE),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {**_GEMMA, "sliding_window": _WINDOW}),
    "gemma3": ("Gemma3Text", {"sliding_window": _WINDOW, "query_pre_attn_scalar": 16}),
    "gemma3, capped": ("Gemma3Text", {**_GEMMA, "sliding_window": _WINDOW}),
    "granite": ("Granite", _GRANITE),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": _WINDOW}),
    "phi3": ("Phi3", {"pad_token_id": 0, "sliding_window": _WINDOW}),
    "smollm3": ("SmolLM3", _SMOLLM3),
    "qwen3.5": ("Qwen3_5Text", _DELTA_NET),
    "qwen3.5, vision": ("Qwen3_5", {"text_config": _DELTA_NET, "vision_config": _VISION}),
    "qwen3-vl": ("Qwen3VL", {"text_config": {}, "vision_config": _VISION}),
    "gemma3, vision": ("Gemma3", {"text_config": _GEMMA3, "vision_config": _SIGLIP}),
    "mistral3": ("Mistral3", {"text_config": _MISTRAL, "vision_config": _PIXTRAL}),
    "qwen3-next": ("Qwen3Next", {**_DELTA_NET, **_MOE, "shared_expert_intermediate_size": 32}),
    "deepseek-v3": ("DeepseekV3", {**_LATENT, "first_k_dense_replace": 1}),
    "glm4-moe": ("Glm4Moe", {**_ROUTED, "first_k_dense_replace": 1}),
    "llama4": ("Llama4Text", _LLAMA4),
    "gemma4": ("Gemma4Text", _GEMMA4),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": _WINDOW}),
    "qwen3-vl-moe": ("Qwen3VLMoe", {"text_config": _MOE, "vision_config": _VISION}),
    "qwen3.5-moe, vision": (
        "Qwen3_5Moe",
        {"text_config": {**_DELTA_NET, **_MOE, "shared_expert_intermediate_size": 32}, "vision_config": _VISION},
    ),
    "qwen3.5-moe": ("Qwen3_5MoeText", {**_DELTA_NET, **_MOE, "shared_expert_intermediate_size": 32}),
    "ministral3": ("Ministral3", {"rope_parameters": _MINISTRAL3, "sliding_window": _WINDOW}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": _WINDOW}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "minimax-m2": ("MiniMaxM2", {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8}),
    "glm4-moe-lite": ("Glm4MoeLite", {**_LATENT, "first_k_dense_replace": 1}),
    "kimi-linear": ("KimiLinear", _KIMI),
    "gemma4, vision": ("Gemma4", {"text_config": _GEMMA4, "vision_config": _GEMMA4_VISION}),
    "helium (unlisted)": ("Helium", {}),
    "deepseek-v3.2": ("DeepseekV32", {**_LATENT, **_INDEXER, "first_k_dense_replace": 1}),
    "nemotron-h": ("NemotronH", _NEMOTRON),
    "nemotron-h, latent": (
        "NemotronH",
        {**_NEMOTRON, "layer_types": ["attention", "moe", "mlp"], "moe_latent_size": 24},
    ),
    "inkling": ("InklingText", _INKLING),
    "inkling, vision": ("Inkling", {"text_config": _INKLING, **_INKLING_TOWERS}),
}


# Unlisted ones that transformers builds too, as CASES does.
OTHERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gpt-neox": ("GPTNeoX", {}),
    "phimoe": ("Phimoe", {"pad_token_id": 0}),
    "mamba2": ("Mamba2", {"num_heads": 8, "n_groups": 1, "state_size": 16}),
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {}),
}

VLLM_ALWAYS = ("gemma3", "gemma4")
"""The cases that the tests run in vLLM every time: a start takes 20 s and more on two free cores."""
VLLM = (
    *(*VLLM_ALWAYS, "llama", "mistral, window", "phi3", "granite", "olmo2", "olmo3", "gemma2", "cohere"),
    *("gemma", "smollm3"),
)
"""The cases that `make families` runs in vLLM's CPU build, with and without an adapter."""
VLLM_FULL = ("qwen3-moe", "glm4-moe")
"""The cases that `make families` runs there without adapters: the CPU build does not run experts beside them."""


def auto_class(config_class: Any) -> Any:
    reads_images = "text_config" in config_class.sub_configs
    return transformers.AutoModelForImageTextToText if reads_images else transformers.AutoModelForCausalLM


def class_name(case: str) -> str:
    """The model class that transformers builds for the case."""
    config_class = getattr(transformers, f"{CASES[case][0]}Config")
    return str(auto_class(config_class)._model_mapping[config_class].__name__)


def config_of(case: str, **shape: Any) -> Any:
    """The case's configuration, with fields of `shape` in place of SHAPE's. A model that reads images has the shape in
    its text_config."""
    name, extra = {**CASES, **OTHERS}[case]
    config_class: Callable[..., Any] = getattr(transformers, f"{name}Config")
    if "text_config" in extra:
        return config_class(**{**extra, "text_config": {**SHAPE, **shape, **extra["text_config"]}})
    return config_class(**{**SHAPE, **shape, **extra})


def build(case: str, folder: Path, **shape: Any) -> Path:
    """Saves the case's model in `folder`, see `config_of`."""
    return save(config_of(case, **shape), folder)


def save(config: Any, folder: Path) -> Path:
    """Saves a random model of this configuration in `folder`."""
    random_model(config).save_pretrained(folder)
    return folder


def random_model(config: Any) -> Any:
    """A random model of this configuration."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return auto_class(type(config)).from_config(config, dtype=torch.float32)
