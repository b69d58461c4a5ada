"""Rotary frequencies that depend on a model's settings, and not on what it computes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_LONG = "longrope"


def fix_frequencies(model: nn.Module, max_context: int) -> None:
    """Gives a LongRoPE model (Phi-3) its long frequencies where `max_context` exceeds its original context, else its
    short ones.

    vLLM does the same. transformers chooses in each call, by the greatest position in it: a datum would get other
    logprobs beside a longer one, and each of the ranks that share a datum other frequencies.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) == _LONG:
            _fix(module, max_context)


def _fix(rotary: Any, max_context: int) -> None:
    compute = ROPE_INIT_FUNCTIONS[_LONG]
    frequencies, rotary.attention_scaling = compute(rotary.config, rotary.inv_freq.device, seq_len=max_context)
    rotary.register_buffer("inv_freq", frequencies, persistent=False)
    rotary.rope_type = f"{_LONG}, fixed"  # the forward of transformers changes the frequencies of the types it knows
    rope = rotary.config.rope_parameters
    if "long_mscale" in rope:  # the forward of PhiMoE computes frequencies itself, and takes the scale of this length
        is_long = max_context > rope["original_max_position_embeddings"]
        scale = rope["long_mscale" if is_long else "short_mscale"]
        rotary.config = deepcopy(rotary.config)
        rotary.config.rope_parameters = {**rope, "short_mscale": scale, "long_mscale": scale}
        rotary.rope_init_fn = lambda _: (frequencies, scale)
