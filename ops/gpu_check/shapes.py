"""Models with the published shapes of Qwen3 and random weights, and what a step of training them computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config

RANK = 32
# Sizes from the config.json of Qwen/Qwen3-0.6B, Qwen3-4B and Qwen3-8B; read 2026-11.
_QWEN3: dict[str, Any] = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    # For trying the check itself; vLLM's CPU build has no smaller heads.
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "0.6B": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "4B": {
        **_QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "8B": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}


def config(size: str) -> PretrainedConfig:
    return Qwen3Config(**SHAPES[size], max_position_embeddings=40_960)


def save(size: str, folder: Path, device: torch.device) -> None:
    """Writes a model in bf16 with random weights, made on `device`, where that takes seconds."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config(size), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def weight_bytes(size: str) -> int:
    """Bytes of the weights in bf16. This allocates none of them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(size), dtype=torch.bfloat16)
    return int(model.num_parameters()) * torch.bfloat16.itemsize


def step_flops(config: PretrainedConfig, lengths: Sequence[int]) -> float:
    """Floating-point operations of a forward and backward pass over datums of `lengths`, and of adapters of RANK on all
    linears.

    A multiplication and an addition are two. A frozen weight has four a token, forward and for its input's gradient. An
    adapter's weight has six. Attention has 2 · length² · heads · head_dim a layer forward, half of the scores being
    masked, and twice that backward (PaLM, arXiv:2204.02311, appendix B, without the gradients of frozen weights).
    Computing a layer again does not count.
    """
    width, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    layer = [(width, heads), (width, kv_heads), (width, kv_heads), (heads, width)]
    layer += [(width, config.intermediate_size)] * 2 + [(config.intermediate_size, width)]
    linears = layer * config.num_hidden_layers + [(width, config.vocab_size)]
    frozen = sum(inputs * outputs for inputs, outputs in linears)
    adapted = sum(RANK * (inputs + outputs) for inputs, outputs in linears)
    attention = 6 * heads * config.num_hidden_layers * sum(length**2 for length in lengths)
    return float((4 * frozen + 6 * adapted) * sum(lengths) + attention)
