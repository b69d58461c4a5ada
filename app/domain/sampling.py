"""A sampling request and its answer. Immutable adapter + seed make a request free to run again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What asample asks, decoded and checked.

    prompt: int32 [L]. `seed` is always set (drawn from the request id when the client gave none); sample i of the
    call uses its own stream. stop_strings and stop_tokens: either may be empty; `ignore_eos` when the client sent `[]`.
    top_k -1 and top_p 1.0 mean off; temperature 0 is greedy.
    """

    prompt: np.ndarray
    num_samples: int
    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_strings: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """tokens int32 [n] (the stop token included), logprobs float32 [n] of the model itself, before temperature,
    top-k and top-p; `stopped` is False when max_tokens or the context ended it."""

    tokens: np.ndarray
    logprobs: np.ndarray
    stopped: bool


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """prompt_logprobs: float32 [L] with NaN at index 0, or None when not asked for."""

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: np.ndarray | None = None
