"""Request handling that both samplers share: checks, limits, seeds and stop conditions.

A sequence ends at an end token, at a stop string, or at its limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from app.domain.records import BaseModelInfo
from app.domain.sampling import SampleRequest
from app.errors import SetupError, UserOpError
from app.settings import BaseModelSettings
from workers.models.base_model import explained, local_path, read_config

_UNFINISHED = "\ufffd"
# A character has at most this many bytes, and a token has hardly ever less than one byte.
_CHARACTER = 4


def check_request(request: SampleRequest, info: BaseModelInfo) -> None:
    """Raises UserOpError for a request that the model cannot take."""
    if min(request.num_samples, request.max_tokens) < 1:
        raise UserOpError(
            f"num_samples is {request.num_samples} and max_tokens is {request.max_tokens}; both must be at least 1"
        )
    length = len(request.prompt)
    if not 0 < length < info.max_context:
        raise UserOpError(
            f"the prompt has {length} tokens; {info.name} takes 1 to {info.max_context - 1}, so that one more fits "
            "into its context"
        )
    low, high = int(request.prompt.min()), int(request.prompt.max())
    if low < 0 or high >= info.vocab_size:
        wrong = low if low < 0 else high
        raise UserOpError(f"prompt token {wrong} is outside the vocabulary of {info.name} (0 to {info.vocab_size - 1})")


def check_finite(logprob: float) -> None:
    """Raises UserOpError for NaN, the result of non-finite logits."""
    if isnan(logprob):
        raise UserOpError("the model's logits are not finite; the adapter holds NaN, infinite or huge weights")


def token_limit(request: SampleRequest, info: BaseModelInfo) -> int:
    """Returns the token limit of a sample: max_tokens, or the space left in the context."""
    return min(request.max_tokens, info.max_context - len(request.prompt))


def sample_seed(seed: int, index: int) -> np.random.SeedSequence:
    """Returns the seed of sample `index` of a call: independent streams, for any seeds and any number of samples."""
    return np.random.SeedSequence([seed % 2**64, index])


def alternatives_seed(seed: int) -> np.random.SeedSequence:
    """Returns the seed for token sampling at a call's prompt positions: a stream apart from those of its samples."""
    return sample_seed(seed, 2**32)


class StopText:
    """Finds stop strings in generated text, token by token. Text of the prompt never counts."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        # Primed with the prompt, since many tokenizers drop the space of a text's first word. Special tokens are kept:
        # a stop string may be one.
        self._stream = DecodeStream(ids=seen(tokenizer, prompt), skip_special_tokens=False)
        self._stops = stops
        self._tail = ""
        self._keep = max(map(len, stops)) - 1

    def completes(self, token: int) -> bool:
        """Returns whether `token` completes a stop string."""
        self._tail += self._stream.step(self._tokenizer, token) or ""
        if any(stop in self._tail for stop in self._stops):
            return True
        self._tail = self._tail[-self._keep :] if self._keep else ""
        return False


def seen(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """Returns the part of the prompt that primes a DecodeStream: all, or nothing if it ends in half a character.

    With half a character, the stream would wait for its end and then return the prompt's full text along with it.
    """
    end = tokenizer.decode(list(prompt[-_CHARACTER:]), skip_special_tokens=False)
    return [] if end.endswith(_UNFINISHED) else list(prompt)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer, which stop strings need, and the model's end tokens."""

    tokenizer: Tokenizer
    end_tokens: frozenset[int]


def load_vocabulary(settings: BaseModelSettings) -> Vocabulary:
    """Loads the model's tokenizer, and every end token that the tokenizer or the model's generation config names.

    Raises SetupError for one that cannot be loaded, or without a fast implementation.
    """
    with explained(settings, tokenizer=True):
        source = settings.tokenizer or settings.path
        tokenizer = AutoTokenizer.from_pretrained(local_path(source), trust_remote_code=False)
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise SetupError(f"the tokenizer at {source!r} has no fast form; add its tokenizer.json")
    with explained(settings):
        named = _generation_config(settings).eos_token_id
    ends = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    return Vocabulary(tokenizer.backend_tokenizer, frozenset(token for token in ends if token is not None))


def _generation_config(settings: BaseModelSettings) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(local_path(settings.path))
    except OSError:  # older models have no generation config, and name the end token in the model's own config
        return GenerationConfig.from_model_config(read_config(settings))
