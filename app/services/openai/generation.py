"""The choices of a call, delta by delta: the same way whether they are sent as they come or whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from app.domain.sampling import SampledSequence, SampleOutput, SampleRequest, TokenLogprobs
from app.services.openai.following import Asked, Following
from app.services.openai.text import Piece, TextStream
from app.services.openai.tokenizer import BaseTokenizer
from app.stores.redis.token_streams import Drawn

Top = Sequence[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token as text, where it begins in its choice's text, and the likeliest ones at its place. The first token of a
    prompt has no logprob."""

    text: str
    logprob: float | None
    offset: int
    top: Top


@dataclass(frozen=True, slots=True)
class Delta:
    """What a choice goes on with; `finish` (stop or length) ends it."""

    choice: int
    text: str
    tokens: tuple[ScoredToken, ...] = ()
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """What is told of the tokens. `hidden`: the one token drawn is nobody's, since max_tokens was 0."""

    scores: bool = False
    echo: bool = False
    hidden: bool = False


class Choices:
    """The choices of one prompt. `sampled_tokens` are counted once the request has `ended`."""

    def __init__(
        self, tokenizer: BaseTokenizer, request: SampleRequest, asked: Asked, first: int, options: Options
    ) -> None:
        """`first`: the index of the first choice."""
        self.asked = asked
        self._tokenizer, self._request, self._first, self._options = tokenizer, request, first, options
        self._prompt = request.prompt.tolist()
        self._texts = [TextStream(tokenizer, self._prompt, request.stop_strings) for _ in range(request.num_samples)]
        self._begin = 0
        self.prompt_tokens = len(self._prompt)
        self.sampled_tokens = 0
        self.ended = False

    def deltas(self, follow: Following, gone: Callable[[], bool]) -> Iterator[Delta]:
        """Raises what `follow` does."""
        if self._options.echo and not self._options.scores:
            yield from self._echo(None, None)
        for news in follow(self.asked, gone):
            if isinstance(news, Drawn):
                yield from self._drawn(news)
            else:
                yield from self._ended(news)

    def _drawn(self, drawn: Drawn) -> Iterator[Delta]:
        text = self._texts[drawn.index]
        known = text.count - drawn.place
        if 0 <= known < len(drawn.tokens) and not text.stopped:
            piece = text.push(drawn.tokens[known:].tolist(), drawn.logprobs[known:].tolist())
            if piece.text or piece.tokens:
                yield self._delta(drawn.index, piece, None)

    def _ended(self, output: SampleOutput) -> Iterator[Delta]:
        self.ended = True
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
        pushed = text.push(sequence.tokens[rest].tolist(), sequence.logprobs[rest].tolist())
        ended = text.finish(sequence.stopped)
        piece = Piece(pushed.text + ended.text, [*pushed.tokens, *ended.tokens])
        finish = "stop" if sequence.stopped or text.stopped else "length"
        yield self._delta(index, piece, sequence.top, finish)

    def _echo(self, logprobs: np.ndarray | None, top: TokenLogprobs | None) -> Iterator[Delta]:
        text = TextStream(self._tokenizer, [], [])
        scores = [0.0] * len(self._prompt) if logprobs is None else logprobs.tolist()
        pushed, ended = text.push(self._prompt, scores), text.finish(stopped=False)
        piece = Piece(pushed.text + ended.text, [*pushed.tokens, *ended.tokens])
        for index in range(self._request.num_samples):
            yield self._delta(index, piece, top)
        self._begin = len(piece.text)

    def _delta(self, index: int, piece: Piece, top: TokenLogprobs | None, finish: str | None = None) -> Delta:
        scored = tuple(self._scored(piece, top)) if self._options.scores else ()
        return Delta(self._first + index, piece.text, scored, finish)

    def _scored(self, piece: Piece, top: TokenLogprobs | None) -> Iterator[ScoredToken]:
        for token in piece.tokens:
            ids, scores = ([], []) if top is None else (top.tokens[token.place], top.logprobs[token.place])
            likely = [(self._tokenizer.token(int(id_)), float(score)) for id_, score in zip(ids, scores, strict=True)]
            known = None if np.isnan(token.logprob) else token.logprob
            text = self._tokenizer.token(token.id)
            yield ScoredToken(text, known, self._begin + token.start, [] if known is None else likely)
