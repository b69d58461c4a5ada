"""The architectures with packed attention and logits computed in chunks, and the rules by which they make logits.

Every other architecture still trains, but padded, and with the full logits of a micro-batch in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LogitRule:
    """The rule logits = cap · tanh(scale · lm_head(h) / cap), without the tanh where `cap` is None.

    `vocabulary`: the rows of the head that are tokens, if the others only pad it.
    """

    scale: float = 1.0
    cap: float | None = None
    vocabulary: int | None = None


def _plain(config: Any) -> LogitRule:
    return LogitRule()


def _capped(config: Any) -> LogitRule:
    return LogitRule(cap=config.get_text_config().final_logit_softcapping)


def _multiplied(config: Any) -> LogitRule:
    return LogitRule(scale=config.logit_scale)


def _divided(config: Any) -> LogitRule:
    return LogitRule(scale=1 / config.logits_scaling)


def _divided_and_padded(config: Any) -> LogitRule:
    text = config.get_text_config()
    return LogitRule(scale=1 / text.logits_mup_width_multiplier, vocabulary=text.unpadded_vocab_size)


ARCHITECTURES: Mapping[str, Callable[[Any], LogitRule]] = {
    "LlamaForCausalLM": _plain,
    "Llama4ForCausalLM": _plain,
    "MistralForCausalLM": _plain,
    "Mistral3ForConditionalGeneration": _plain,
    "Ministral3ForCausalLM": _plain,
    "MixtralForCausalLM": _plain,
    "Qwen2ForCausalLM": _plain,
    "Qwen3ForCausalLM": _plain,
    "Qwen3MoeForCausalLM": _plain,
    "Qwen3NextForCausalLM": _plain,
    "Qwen3VLForConditionalGeneration": _plain,
    "Qwen3VLMoeForConditionalGeneration": _plain,
    "Qwen3_5ForCausalLM": _plain,
    "Qwen3_5ForConditionalGeneration": _plain,
    "Qwen3_5MoeForCausalLM": _plain,
    "Qwen3_5MoeForConditionalGeneration": _plain,
    "GemmaForCausalLM": _plain,
    "Gemma2ForCausalLM": _capped,
    "Gemma3ForCausalLM": _capped,
    "Gemma3ForConditionalGeneration": _plain,
    "Gemma4ForCausalLM": _capped,
    "Gemma4ForConditionalGeneration": _capped,
    "DeepseekV3ForCausalLM": _plain,
    "DeepseekV32ForCausalLM": _plain,
    "Glm4MoeForCausalLM": _plain,
    "Glm4MoeLiteForCausalLM": _plain,
    "GptOssForCausalLM": _plain,
    "InklingForCausalLM": _divided_and_padded,
    "InklingForConditionalGeneration": _divided_and_padded,
    "KimiLinearForCausalLM": _plain,
    "MiniMaxM2ForCausalLM": _plain,
    "NemotronHForCausalLM": _plain,
    "CohereForCausalLM": _multiplied,
    "GraniteForCausalLM": _divided,
    "Olmo2ForCausalLM": _plain,
    "Olmo3ForCausalLM": _plain,
    "OlmoeForCausalLM": _plain,
    "Phi3ForCausalLM": _plain,
    "SmolLM3ForCausalLM": _plain,
}
"""The rules by transformers' class names. Each class needs a case in tests/parity/architectures.py, which compares it
with transformers' own forward and gradients."""


def logit_rule(model: Any) -> LogitRule | None:
    """Returns the rule by which `model` (a transformers PreTrainedModel) makes logits of hidden states, or None.

    None means that the architecture is not known here.
    """
    rule = ARCHITECTURES.get(type(model).__name__)
    return None if rule is None else rule(model.config)
