"""Checks of a sampling request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.domain.base_models import BaseModelInfo
from app.domain.sampling import SampleRequest
from app.errors import BadRequest
from app.services.checks.values import in_range

MAX_SAMPLES = 1024
MAX_STOPS = 64
MAX_TOP_K = 2**31 - 1
_UNSUPPORTED = (
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "prompt_alt_tokens_k",
    "target_prompt_logprobs",
    "prompt_logprobs_last_n",
)


def check_supported(asked: Mapping[str, Any]) -> None:
    """Refuses what would otherwise be left out of the answer in silence."""
    for name in _UNSUPPORTED:
        if asked.get(name):
            raise BadRequest(f"{name} is not supported; leave it out or send 0")


def check_sample(request: SampleRequest, info: BaseModelInfo) -> None:
    """Raises BadRequest when `request` could not run on this base model."""
    check_prompt(request, info)
    in_range("num_samples", request.num_samples, 1, MAX_SAMPLES)
    in_range("sampling_params.max_tokens", request.max_tokens, 1)
    in_range("sampling_params.temperature", request.temperature, 0)
    in_range("sampling_params.top_p", request.top_p, 0, 1, open_ends="(")
    if request.top_k != -1:
        in_range("sampling_params.top_k", request.top_k, 1, MAX_TOP_K)
    check_stops(request, info)


def check_prompt(request: SampleRequest, info: BaseModelInfo) -> None:
    """Ids in the vocabulary, and room for one more token in the context."""
    prompt = request.prompt
    if not 1 <= len(prompt) < info.max_context:
        raise BadRequest(
            f"prompt has {len(prompt)} tokens; the model takes 1 to {info.max_context - 1}, "
            "so that one more fits into its context"
        )
    outside = (prompt < 0) | (prompt >= info.vocab_size)
    if outside.any():
        index = int(outside.argmax())
        raise BadRequest(f"prompt at position {index}: token {prompt[index]} is not in 0..{info.vocab_size - 1}")


def check_stops(request: SampleRequest, info: BaseModelInfo) -> None:
    """Few enough, none empty, ids in the vocabulary."""
    count = len(request.stop_strings) + len(request.stop_tokens)
    if count > MAX_STOPS:
        raise BadRequest(f"sampling_params.stop has {count} entries; at most {MAX_STOPS} are allowed")
    if "" in request.stop_strings:
        raise BadRequest("sampling_params.stop holds an empty string")
    for token in request.stop_tokens:
        in_range("sampling_params.stop token", token, 0, info.vocab_size - 1)
