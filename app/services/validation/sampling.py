"""Checks of a sampling request."""

from __future__ import annotations

import numpy as np

from app.domain.records import BaseModelInfo
from app.domain.sampling import MAX_TOP, Cells, SampleRequest
from app.errors import BadRequest
from app.services.validation.training import in_range

MAX_SAMPLES = 1024
MAX_STOPS = 64
MAX_STOP_BYTES = 1024
"""Most UTF-8 bytes of one stop string. The sampled text is searched for all stop strings at every token."""
MAX_TEMPERATURE = 2
"""vLLM supports no more, and OpenAI's clients do not ask for more."""
MAX_TOP_K = 2**31 - 1
MAX_CELLS = 2**22
"""Most additional logprobs in one answer, besides those of the prompt and the samples: 32 MiB, half of it ids."""


def check_sample(request: SampleRequest, info: BaseModelInfo) -> None:
    """Raises BadRequest when `request` cannot run on this base model."""
    check_prompt(request, info)
    in_range("num_samples", request.num_samples, 1, MAX_SAMPLES)
    in_range("sampling_params.max_tokens", request.max_tokens, 1)
    in_range("sampling_params.temperature", request.temperature, 0, MAX_TEMPERATURE)
    in_range("sampling_params.top_p", request.top_p, 0, 1, open_ends="(")
    if request.top_k != -1:
        in_range("sampling_params.top_k", request.top_k, 1, MAX_TOP_K)
    check_stops(request, info)
    check_scores(request, info)


def check_prompt(request: SampleRequest, info: BaseModelInfo) -> None:
    """Requires ids in the vocabulary, and room for one more token in the context."""
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
    """Limits the number and the length of the stop entries. None is empty, and ids are in the vocabulary."""
    count = len(request.stop_strings) + len(request.stop_tokens)
    if count > MAX_STOPS:
        raise BadRequest(f"sampling_params.stop has {count} entries; at most {MAX_STOPS} are allowed")
    if "" in request.stop_strings:
        raise BadRequest("sampling_params.stop holds an empty string")
    for stop in request.stop_strings:
        size = len(stop.encode("utf-8", "surrogatepass"))
        if size > MAX_STOP_BYTES:
            raise BadRequest(
                f"sampling_params.stop holds a string of {size} bytes; at most {MAX_STOP_BYTES} are allowed"
            )
    for token in request.stop_tokens:
        in_range("sampling_params.stop token", token, 0, info.vocab_size - 1)


def check_scores(request: SampleRequest, info: BaseModelInfo) -> None:
    """Requires that the model can give every requested logprob, and limits the number of logprobs in one answer."""
    rows = len(request.prompt) - 1
    if request.prompt_last_n:
        if not request.prompt_logprobs:
            raise BadRequest("prompt_logprobs_last_n needs prompt_logprobs: set both, or leave it out")
        in_range("prompt_logprobs_last_n", request.prompt_last_n, 1, rows)
    likeliest = min(MAX_TOP, info.vocab_size)
    in_range("topk_prompt_logprobs", request.prompt_top, 0, likeliest)
    in_range("topk_sample_logprobs", request.sample_top, 0, likeliest)
    in_range("prompt_alt_tokens_k", request.prompt_alternatives, 0)
    targets = 0 if request.prompt_targets is None else check_targets(request.prompt_targets, rows, info.vocab_size)
    check_size("topk_prompt_logprobs", request.prompt_top, rows + 1)
    check_size("prompt_alt_tokens_k", request.prompt_alternatives, rows)
    check_size("target_prompt_logprobs", targets, rows)
    check_size("topk_sample_logprobs", request.sample_top, request.num_samples * request.max_tokens)


def check_targets(targets: Cells, rows: int, vocab_size: int) -> int:
    """The largest number of ids at one position. There is a row for each position except the first, and at least one
    id; all ids are in the vocabulary."""
    if len(targets.starts) != rows + 1:
        raise BadRequest(
            f"target_prompt_logprobs has {len(targets.starts) - 1} rows; the prompt has {rows + 1} tokens, so it "
            f"needs {rows}: row i is for position i + 1"
        )
    ids = targets.values
    wrong = (ids < -1) | (ids >= vocab_size)
    if wrong.any():
        cell = int(wrong.argmax())
        row = int(np.searchsorted(targets.starts, cell, side="right")) - 1
        raise BadRequest(
            f"target_prompt_logprobs in row {row}: token {ids[cell]} is not in 0..{vocab_size - 1}, and is not -1 "
            "(none)"
        )
    if not (ids >= 0).any():
        raise BadRequest("target_prompt_logprobs names no token id: name at least one, or leave it out")
    return int(np.diff(targets.starts).max())


def check_size(name: str, width: int, positions: int) -> None:
    """Raises BadRequest if `width` logprobs at each of `positions` positions make the answer too large."""
    if width * positions > MAX_CELLS:
        raise BadRequest(
            f"{name}: {width} at each of {positions} positions is {width * positions} logprobs; one answer holds at "
            f"most {MAX_CELLS}"
        )
