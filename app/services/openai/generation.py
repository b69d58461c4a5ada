"""The choices of a call, delta by delta, with their tokens as text. The text is the same whether streamed or sent at
once.

Text never ends in half a character, or in part of a stop string.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from app.domain.sampling import SampledSequence, SampleOutput, SampleRequest, TokenLogprobs, TokenText
from app.services.openai.streaming import Gone, PendingSample, ResultStream
from app.services.openai.tokenizer import BaseTokenizer
from app.stores.redis.completions import TokenChunk

Top = Sequence[tuple[str, float]]

# The leading space of a first word depends on the text before it, but only on the last few tokens.
_CONTEXT = 8
_UNFINISHED = "\ufffd"


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token by its id and as text, its offset in its choice's text, and the most likely tokens at its position. The
    first token of a prompt has no logprob."""

    id: int
    text: str
    logprob: float | None
    offset: int
    top: Top


@dataclass(frozen=True, slots=True)
class Delta:
    """The next part of a choice; `finish` (stop or length) ends the choice. `stop`: the stop string that ended it.
    `prompt`: the prompt's token ids, in the first delta of a choice if ids are asked for."""

    choice: int
    text: str
    tokens: tuple[ScoredToken, ...] = ()
    finish: str | None = None
    stop: str | None = None
    prompt: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class TokenOptions:
    """The token details that an answer includes. `ids`: each sampled token with its id, also those that ended the
    answer. `hidden`: the one sampled token is left out, since max_tokens was 0. `tags`: special tokens that are part of
    the text."""

    scores: bool = False
    ids: bool = False
    echo: bool = False
    hidden: bool = False
    tags: Sequence[str] = ()


class Choices:
    """The choices of one prompt. `sampled_tokens`, `cached_tokens` (of the prompt, not computed again) and `sequences`
    are final once the request has `ended`."""

    def __init__(
        self,
        tokenizer: BaseTokenizer,
        request: SampleRequest,
        pending: PendingSample,
        first: int,
        options: TokenOptions,
    ) -> None:
        """`first`: the index of the first choice."""
        self.pending = pending
        self.request = request
        self._tokenizer, self._first, self._options = tokenizer, first, options
        self._prompt = request.prompt.tolist()
        tags = tokenizer.special_ids(options.tags)
        self._texts = [
            TextStream(tokenizer, self._prompt, request.stop_strings, tags) for _ in range(request.num_samples)
        ]
        self._begin = 0
        self._begun: set[int] = set()
        self.prompt_tokens = len(self._prompt)
        self.sampled_tokens = self.cached_tokens = 0
        self.sequences: Sequence[SampledSequence] = ()
        self.ended = False

    def deltas(self, result_stream: ResultStream, gone: Gone) -> Iterator[Delta]:
        """The deltas as they come. Raises the errors of `result_stream`."""
        if self._options.echo and not self._options.scores:
            yield from self._echo(None, None)
        for news in result_stream(self.pending, gone):
            if isinstance(news, TokenChunk):
                yield from self._add_chunk(news)
            else:
                yield from self._ended(news)

    def _add_chunk(self, chunk: TokenChunk) -> Iterator[Delta]:
        text = self._texts[chunk.index]
        known = text.count - chunk.position
        if 0 <= known < len(chunk.tokens) and not text.stopped:
            piece = text.push(chunk.tokens[known:].tolist(), chunk.logprobs[known:].tolist())
            if piece.text or piece.tokens:
                yield self._delta(chunk.index, piece, None)

    def _ended(self, output: SampleOutput) -> Iterator[Delta]:
        self.ended, self.sequences = True, () if self._options.hidden else output.sequences
        self.cached_tokens = output.cached_tokens
        if self._options.echo and self._options.scores:
            yield from self._echo(output.prompt_logprobs, output.prompt_top)
        for index, sequence in enumerate(output.sequences):
            if self._options.hidden:
                yield Delta(self._first + index, "", finish="length")
            else:
                self.sampled_tokens += len(sequence.tokens)
                yield from self._rest(index, sequence)

    def _rest(self, index: int, sequence: SampledSequence) -> Iterator[Delta]:
        text = self._texts[index]
        rest = slice(text.count, None)
        piece = text.push(sequence.tokens[rest].tolist(), sequence.logprobs[rest].tolist())
        piece += text.finish(sequence.stopped, whole=self._options.ids)
        finish = "stop" if sequence.stopped or text.stopped else "length"
        yield replace(self._delta(index, piece, sequence.top), finish=finish, stop=text.stop)

    def _echo(self, logprobs: np.ndarray | None, top: TokenLogprobs | None) -> Iterator[Delta]:
        text = TextStream(self._tokenizer, [], [])
        scores = [0.0] * len(self._prompt) if logprobs is None else logprobs.tolist()
        piece = text.push(self._prompt, scores) + text.finish(stopped=False)
        for index in range(self.request.num_samples):
            yield self._delta(index, piece, top)
        self._begin = len(piece.text)

    def _delta(self, index: int, piece: Piece, top: TokenLogprobs | None) -> Delta:
        scored = tuple(self._scored(piece, top)) if self._options.scores or self._options.ids else ()
        prompt = self._prompt if self._options.ids and index not in self._begun else None
        self._begun.add(index)
        return Delta(self._first + index, piece.text, scored, prompt=prompt)

    def _scored(self, piece: Piece, top: TokenLogprobs | None) -> Iterator[ScoredToken]:
        for token in piece.tokens:
            ids, scores = ([], []) if top is None else (top.tokens[token.position], top.logprobs[token.position])
            likely = [(self._tokenizer.token(int(id_)), float(score)) for id_, score in zip(ids, scores, strict=True)]
            known = None if np.isnan(token.logprob) else token.logprob
            text = self._tokenizer.token(token.id)
            yield ScoredToken(token.id, text, known, self._begin + token.start, [] if known is None else likely)


@dataclass(frozen=True, slots=True)
class TextToken:
    """A token, and the offset of its text in the text of its sample; `position` is the token's own index."""

    position: int
    id: int
    logprob: float
    start: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is certainly part of the answer, and the tokens that certainly are."""

    text: str
    tokens: Sequence[TextToken]

    def __add__(self, other: Piece) -> Piece:
        return Piece(self.text + other.text, [*self.tokens, *other.tokens])


class TextStream:
    """The text of one sample. The pieces together give the same text, however the tokens were split into calls."""

    def __init__(
        self,
        tokenizer: BaseTokenizer,
        prompt: Sequence[int],
        stops: Sequence[str],
        tags: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """`tags`: the texts of special tokens that are part of the text, by their ids."""
        self._tokenizer, self._tags = tokenizer, tags
        self._decoder = _decoder(tokenizer, prompt)
        self._search = StopSearch(tokenizer, prompt, stops) if stops else None
        self._text = ""
        self._sent = 0
        self._cut: int | None = None
        self._held: list[TextToken] = []
        self.count = 0

    @property
    def stopped(self) -> bool:
        """True once a stop string has come; nothing after it is part of the answer."""
        return self._cut is not None

    @property
    def stop(self) -> str | None:
        """The stop string that has come."""
        return self._search.found if self._search else None

    def push(self, tokens: Sequence[int], logprobs: Sequence[float]) -> Piece:
        """Adds tokens, and returns the text and tokens that are certain by now. The newest token is never certain,
        because it may be the stop token."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            self._take(token, logprob)
        text = self._pass_on(self._sure())
        done = [token for token in self._held[:-1] if self._end(token) <= self._sent]
        self._held = self._held[len(done) :]
        return Piece(text, done)

    def finish(self, stopped: bool, *, whole: bool = False) -> Piece:
        """The rest of the text. `stopped`: the last token is a stop token, or completed a stop string. With `whole` the
        tokens of the stop are among the tokens."""
        if not self.stopped:
            self._text += self._decoder.rest()
        text = self._pass_on(len(self._text) if self._cut is None else self._cut)
        if whole:
            return Piece(text, self._held)
        if self._cut is not None:
            return Piece(text, [token for token in self._held if token.start < self._sent])
        return Piece(text, self._held[:-1] if stopped else self._held)

    def _take(self, token: int, logprob: float) -> None:
        self._held.append(TextToken(self.count, token, logprob, len(self._text)))
        self.count += 1
        self._text += self._decode(token)
        if self._search is not None and self._cut is None:
            self._cut = self._search.add(token, len(self._text))

    def _decode(self, token: int) -> str:
        """The text that is certain with this token: its own, and that of earlier tokens which had none yet."""
        if token in self._tags:
            text = self._decoder.rest()
            self._decoder = _decoder(self._tokenizer, [])
            return text + self._tags[token]
        return self._decoder.add(token)

    def _sure(self) -> int:
        """The length of the text that can no longer become part of a stop string."""
        if self._cut is not None:
            return self._cut
        return len(self._text) if self._search is None else self._search.sure()

    def _pass_on(self, upto: int) -> str:
        text, self._sent = self._text[self._sent : upto], upto
        return text

    def _end(self, token: TextToken) -> int:
        """The start of the next token's text; `token` is a held one, and not the last."""
        following = self._held[token.position - self._held[0].position + 1]
        return following.start


class StopSearch:
    """Searches stop strings in a sample's text with its special tokens, as the samplers do: a stop string may contain
    one. The places that it returns are those of the shown text, which has no special tokens."""

    def __init__(self, tokenizer: BaseTokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._stops = stops
        self._decoder = _decoder(tokenizer, prompt, skip_special_tokens=False)
        self._text = ""
        # Where each token's text ends, in this text and in the shown one.
        self._ends, self._shown_ends = [0], [0]
        self.found: str | None = None

    def add(self, token: int, shown: int) -> int | None:
        """Adds a token, after which the shown text has `shown` characters. Returns the place of the first stop string
        that ends with it, and keeps the string as `found`; else None."""
        new = self._decoder.add(token)
        self._text += new
        self._ends.append(len(self._text))
        self._shown_ends.append(shown)
        begins = [(stop, max(0, len(self._text) - len(new) - len(stop) + 1)) for stop in self._stops]
        found = [(place, stop) for stop, begin in begins if (place := self._text.find(stop, begin)) >= 0]
        if not found:
            return None
        place, self.found = min(found)
        return self._place(place)

    def sure(self) -> int:
        """The length of the shown text that can no longer become part of a stop string."""
        return self._place(len(self._text) - held_back(self._text, self._stops))

    def _place(self, place: int) -> int:
        token = bisect_right(self._ends, place)
        shown = self._shown_ends[token - 1] + place - self._ends[token - 1]
        return min([shown, *self._shown_ends[token : token + 1]])


def held_back(text: str, marks: Sequence[str]) -> int:
    """The number of characters at the end of `text` that may be the start of one of `marks`."""
    longest, begins = max((len(mark) - 1 for mark in marks), default=0), {mark[0] for mark in marks}
    lengths = (length for length in range(min(longest, len(text)), 0, -1) if text[-length] in begins)
    return next((length for length in lengths if any(mark.startswith(text[-length:]) for mark in marks)), 0)


def _decoder(tokenizer: BaseTokenizer, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> TokenText:
    context = list(prompt[-_CONTEXT:])
    if tokenizer.core.decode(context, skip_special_tokens=skip_special_tokens).endswith(_UNFINISHED):
        # With this context, the decoder would wait for the end of the character and then return the prompt's text with
        # it.
        context = []
    return TokenText(tokenizer.core, context, skip_special_tokens=skip_special_tokens)
