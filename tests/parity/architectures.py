"""Tiny random models of every architecture that training is tested on: two layers of width 64, vocab 320, fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models import VOCAB_SIZE

_SHAPE: dict[str, Any] = {
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

# transformers' name of the configuration without "Config", and the fields that make it differ from its neighbours.
# "(unlisted)": workers/backends/training/lm_head.py does not list it, so it is padded and its logits are whole.
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
    "cohere (unlisted)": ("Cohere", {"logit_scale": 0.5}),
    "olmo2 (unlisted)": ("Olmo2", {}),
    "olmo3 (unlisted)": ("Olmo3", {"sliding_window": _WINDOW}),
    "phi3 (unlisted)": ("Phi3", {"pad_token_id": 0}),
    "smollm3 (unlisted)": ("SmolLM3", {"pad_token_id": 0}),
    "qwen3.5 (unlisted)": ("Qwen3_5Text", _DELTA_NET),
}


def class_name(case: str) -> str:
    """The model class that transformers builds for the case."""
    config_class = getattr(transformers, f"{CASES[case][0]}Config")
    return str(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config_class].__name__)


def build(case: str, folder: Path) -> Path:
    """Saves the case's model in `folder`."""
    name, extra = CASES[case]
    config_class: Callable[..., Any] = getattr(transformers, f"{name}Config")
    config = config_class(**{**_SHAPE, **extra})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder
