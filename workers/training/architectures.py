"""The architectures whose attention may be packed, and whose logits may be made piece by piece.

Everything not listed still trains, but padded, and with the logits of a micro-batch held whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LogitRule:
    """logits = cap · tanh(scale · lm_head(h) / cap), without the tanh where `cap` is None."""

    scale: float = 1.0
    cap: float | None = None


def _plain(config: Any) -> LogitRule:
    return LogitRule()


def _capped(config: Any) -> LogitRule:
    return LogitRule(cap=config.final_logit_softcapping)


def _scaled(config: Any) -> LogitRule:
    return LogitRule(scale=1 / config.logits_scaling)


# Each is compared with transformers' own forward in tests/parity/test_architectures.py; add the two together.
_RULES: Mapping[str, Callable[[Any], LogitRule]] = {
    "LlamaForCausalLM": _plain,
    "MistralForCausalLM": _plain,
    "Qwen2ForCausalLM": _plain,
    "Qwen3ForCausalLM": _plain,
    "Qwen3MoeForCausalLM": _plain,
    "GemmaForCausalLM": _plain,
    "Gemma2ForCausalLM": _capped,
    "Gemma3ForCausalLM": _capped,
    "GraniteForCausalLM": _scaled,
}


def logit_rule(model: Any) -> LogitRule | None:
    """How `model` (a transformers PreTrainedModel) makes logits of hidden states; None when it is not known here."""
    rule = _RULES.get(type(model).__name__)
    if rule is None or getattr(model.config, "use_bidirectional_attention", False):
        return None
    return rule(model.config)
