"""Tokens to text as they come: never half a character, and never part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.services.openai.tokenizer import BaseTokenizer

if TYPE_CHECKING:
    from tokenizers.decoders import DecodeStream

# A first word's leading space depends on what stands before it, and on no more than the last few tokens.
_CONTEXT = 8
_UNFINISHED = "\ufffd"


@dataclass(frozen=True, slots=True)
class TextToken:
    """A token and where its text begins among all of its sample's; `place` is the token's own."""

    place: int
    id: int
    logprob: float
    start: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is sure to be part of the answer, and the tokens that are."""

    text: str
    tokens: Sequence[TextToken]


class TextStream:
    """One sample's. What it gives, put together, is the same however the tokens were cut into pieces."""

    def __init__(self, tokenizer: BaseTokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._decoder = _decoder(tokenizer, prompt)
        self._stops = stops
        self._text = ""
        self._sent = 0
        self._cut: int | None = None
        self._held: list[TextToken] = []
        self._undecoded: list[int] = []
        self.count = 0

    @property
    def stopped(self) -> bool:
        """A stop string has come; nothing behind it is part of the answer."""
        return self._cut is not None

    def push(self, tokens: Sequence[int], logprobs: Sequence[float]) -> Piece:
        """Take further tokens; returns what is sure by now. The newest token never is: it may be the one that stops."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            self._take(token, logprob)
        text = self._pass_on(self._sure())
        done = [token for token in self._held[:-1] if self._end(token) <= self._sent]
        self._held = self._held[len(done) :]
        return Piece(text, done)

    def finish(self, stopped: bool) -> Piece:
        """The rest. `stopped`: its last token is a stop token, or completed a stop string."""
        if not self.stopped:
            self._text += self._tokenizer.decode(self._undecoded) if self._undecoded else ""
        text = self._pass_on(len(self._text) if self._cut is None else self._cut)
        if self._cut is not None:
            return Piece(text, [token for token in self._held if token.start < self._sent])
        return Piece(text, self._held[:-1] if stopped else self._held)

    def _take(self, token: int, logprob: float) -> None:
        self._held.append(TextToken(self.count, token, logprob, len(self._text)))
        self.count += 1
        self._undecoded.append(token)
        text = self._decoder.step(self._tokenizer.core, token)
        if text:
            self._undecoded.clear()
            self._text += text
            if self._cut is None:
                self._cut = self._find_stop(len(text))

    def _find_stop(self, new: int) -> int | None:
        """Where the first stop string begins that ends in the last `new` characters."""
        begins = [(stop, max(self._sent, len(self._text) - new - len(stop) + 1)) for stop in self._stops]
        found = [place for stop, begin in begins if (place := self._text.find(stop, begin)) >= 0]
        return min(found, default=None)

    def _sure(self) -> int:
        """How much of the text cannot become part of a stop string any more."""
        if self._cut is not None:
            return self._cut
        return len(self._text) - held_back(self._text[self._sent :], self._stops)

    def _pass_on(self, upto: int) -> str:
        text, self._sent = self._text[self._sent : upto], upto
        return text

    def _end(self, token: TextToken) -> int:
        """Where the text of the token behind begins; `token` is a held one, and not the last."""
        following = self._held[token.place - self._held[0].place + 1]
        return following.start


def held_back(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the begin of one of `marks`."""
    longest, begins = max((len(mark) - 1 for mark in marks), default=0), {mark[0] for mark in marks}
    lengths = (length for length in range(min(longest, len(text)), 0, -1) if text[-length] in begins)
    return next((length for length in lengths if any(mark.startswith(text[-length:]) for mark in marks)), 0)


def _decoder(tokenizer: BaseTokenizer, prompt: Sequence[int]) -> DecodeStream:
    from tokenizers.decoders import DecodeStream

    context = list(prompt[-_CONTEXT:])
    if tokenizer.decode(context).endswith(_UNFINISHED):
        # The decoder would wait for the character's end and then give the prompt's text along with it.
        context = []
    return DecodeStream(ids=context, skip_special_tokens=True)
