"""A sampling request and its answer. The adapter is immutable and the seed is fixed, so a request may run again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from app.domain.images import Image

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

MAX_TOP = 1024
"""Largest number of most likely tokens at a position that a request may ask for. The pass over the vocabulary costs the
same for any number; the answer grows with it, and is limited to 8 KB a position."""

CONTEXT_OVERFLOW = "Prompt length plus max_tokens exceeds the model's context window"
"""The hosted service's words for a prompt that is too long. Programs look for them to end an episode, not the run."""


@dataclass(frozen=True, slots=True)
class Cells:
    """A matrix in which only some cells are given, row by row: row i holds values[starts[i] : starts[i + 1]].

    values [n]: int64 token ids in a request, float32 logprobs in an answer. starts: int64 [rows + 1], from 0 to n.
    columns: int64 [n], the column of each in a sparse matrix `width` wide, or None when every cell is given.
    """

    values: np.ndarray
    starts: np.ndarray
    width: int
    columns: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """The request of asample, decoded and checked.

    prompt: int32 [L]. `seed` is always set (derived from the request id when the client gave none); sample i of
    the call uses its own random stream. stop_strings and stop_tokens: either may be empty; `ignore_eos` when the client
    sent `[]`. top_k -1 and top_p 1.0 mean off; temperature 0 is greedy.

    For the prompt: `prompt_logprobs` of the last `prompt_last_n` tokens (0: of all), the `prompt_top` likeliest tokens
    at the same positions, the ids of `prompt_targets` in row i at position i + 1 (-1: none), and
    `prompt_alternatives` tokens sampled at each position but the first. `sample_top`: the likeliest tokens at each
    position of a sample. 0 and None mean not asked for.
    `stream`: its tokens are published as they are sampled. `images` in the order of their positions; the prompt's
    tokens there are 0. `json_schema`: JSON text of the schema that every sample follows; empty for none.
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
    prompt_last_n: int = 0
    prompt_top: int = 0
    prompt_targets: Cells | None = None
    prompt_alternatives: int = 0
    sample_top: int = 0
    stream: bool = False
    images: tuple[Image, ...] = ()
    json_schema: str = ""

    @property
    def most_tokens(self) -> int:
        """The most tokens that the request may take: its prompt, and all samples at full length."""
        return len(self.prompt) + self.num_samples * self.max_tokens

    @property
    def scores_prompt(self) -> bool:
        """True if it asks for scores that need the logits of its prompt."""
        asks = self.prompt_logprobs or self.prompt_top or self.prompt_alternatives
        return len(self.prompt) > 1 and bool(asks or self.prompt_targets is not None)

    def longest_prompt(self, max_context: int) -> int:
        """The most tokens that its prompt may have. One token must fit after them, unless the prompt is scored."""
        return max_context if self.scores_prompt else max_context - 1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Several tokens at each of n positions: tokens int32 [n, k] and their logprobs float32 [n, k]."""

    tokens: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """tokens int32 [n] (the stop token included), logprobs float32 [n] of the model itself, before temperature,
    top-k and top-p; `stopped` is False when max_tokens or the context ended it. n is 0 after a prompt that fills the
    context. top: the likeliest tokens at each position. routes: [n - 1, layers, top_k] as in app.domain.routes, where
    the sampler records them; the last token never went through the model."""

    tokens: np.ndarray
    logprobs: np.ndarray
    stopped: bool
    top: TokenLogprobs | None = None
    routes: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """The answer to a request. All logprobs are the model's own, before temperature, as in SampledSequence. A field
    that was not asked for is None.

    prompt_logprobs: float32 [L], NaN where not scored and at index 0. prompt_top: [L, k], each row by falling logprob;
    rows not scored are token 0 at UNSCORED. prompt_targets: float32 in the request's layout, 0.0 where it had -1.
    prompt_alternatives: [L - 1, k] sampled tokens, row i for position i + 1. cached_tokens: prompt tokens that were not
    computed again. prompt_routes: [L, layers, top_k], as in SampledSequence.
    """

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: np.ndarray | None = None
    prompt_top: TokenLogprobs | None = None
    prompt_targets: Cells | None = None
    prompt_alternatives: TokenLogprobs | None = None
    cached_tokens: int = 0
    prompt_routes: np.ndarray | None = None


UNSCORED = -99999.0
"""The SDK reads this value, with token 0, as "no logprob"."""


class TokenText:
    """The text of tokens that come one by one, behind those of `context`.

    `undecoded`: the last tokens, which have no text yet, for instance half a character.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        self._stream = self._stream_behind(context)
        self.undecoded: list[int] = []

    def add(self, token: int) -> str:
        """The text that is certain with this token: its own, and that of `undecoded`."""
        self.undecoded.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception as error:  # tokenizers raises nothing narrower
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            text = self._without_prefix(token)
        if text:
            self.undecoded.clear()
        return text or ""

    def rest(self) -> str:
        """The text of `undecoded`."""
        return self._tokenizer.decode(self.undecoded, skip_special_tokens=self._skips)

    def _without_prefix(self, token: int) -> str:
        """The text where tokens changed that of tokens before them, which has been returned: a ByteFallback decoder
        (Llama 2, Mistral, Gemma) makes each byte of a run U+FFFD if the run is not UTF-8 as a whole."""
        before = self._tokenizer.decode(self.undecoded[:-1], skip_special_tokens=self._skips)
        # The token is its own context, because a text's first word would lose the space before it.
        self._stream = self._stream_behind([token])
        return before + (self._stream.step(self._tokenizer, token) or "")

    def _stream_behind(self, context: Sequence[int]) -> DecodeStream:
        from tokenizers.decoders import DecodeStream

        return DecodeStream(ids=list(context), skip_special_tokens=self._skips)
