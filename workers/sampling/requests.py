"""What both samplers do alike with a request: refuse what cannot run, bound its length, seed its samples."""

from __future__ import annotations

from math import isnan

import numpy as np

from app.domain.base_models import BaseModelInfo
from app.domain.sampling import SampleRequest
from app.errors import UserOpError


def check(request: SampleRequest, info: BaseModelInfo) -> None:
    """Raises UserOpError for a request the model cannot take."""
    if min(request.num_samples, request.max_tokens) < 1:
        raise UserOpError(
            f"num_samples is {request.num_samples} and max_tokens is {request.max_tokens}; both must be at least 1"
        )
    length = len(request.prompt)
    if not 0 < length < info.max_context:
        raise UserOpError(
            f"the prompt has {length} tokens; {info.name} takes 1 to {info.max_context - 1}, so that one can follow"
        )
    low, high = int(request.prompt.min()), int(request.prompt.max())
    if low < 0 or high >= info.vocab_size:
        wrong = low if low < 0 else high
        raise UserOpError(f"prompt token {wrong} is outside the vocabulary of {info.name} (0 to {info.vocab_size - 1})")


def check_finite(logprob: float) -> None:
    """Raises UserOpError for the NaN that non-finite logits leave."""
    if isnan(logprob):
        raise UserOpError("the model's logits are not finite; the adapter holds NaN, infinite or huge weights")


def token_limit(request: SampleRequest, info: BaseModelInfo) -> int:
    """How many tokens a sample may have: max_tokens, or what the context leaves."""
    return min(request.max_tokens, info.max_context - len(request.prompt))


def sample_seed(seed: int, index: int) -> np.random.SeedSequence:
    """The seed of sample `index` of a call: independent streams, whatever the seeds and however many samples."""
    return np.random.SeedSequence([seed % 2**64, index])


def alternatives_seed(seed: int) -> np.random.SeedSequence:
    """The seed of a call's draws at its prompt's positions: a stream beside those of its samples."""
    return sample_seed(seed, 2**32)
