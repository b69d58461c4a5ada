"""The text_completion form of an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from app.services.openai.answers import Head, merged
from app.services.openai.generation import Delta, ScoredToken


class CompletionForm:
    """See answers.Form. top: how many of the likeliest tokens were asked for; None for no logprobs at all."""

    def __init__(self, top: int | None) -> None:
        self._top = top

    def whole(self, head: Head, deltas: Iterable[Delta]) -> dict[str, Any]:
        return {**_head(head), "choices": [self._choice(delta) for delta in merged(deltas)]}

    def chunks(self, head: Head, deltas: Iterable[Delta]) -> Iterator[dict[str, Any]]:
        for delta in deltas:
            yield {**_head(head), "choices": [self._choice(delta)]}

    def last(self, head: Head) -> dict[str, Any]:
        return {**_head(head), "choices": []}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        logprobs = None if self._top is None else _logprobs(delta.tokens, with_top=self._top > 0)
        return {"index": delta.choice, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish}


def _head(head: Head) -> dict[str, Any]:
    return {
        "id": f"cmpl-{head.request_id}",
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
    }


def _logprobs(tokens: Iterable[ScoredToken], *, with_top: bool) -> dict[str, Any]:
    tokens = list(tokens)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_top(token) for token in tokens] if with_top else None,
        "text_offset": [token.offset for token in tokens],
    }


def _top(token: ScoredToken) -> dict[str, float] | None:
    """The chosen token is among them even if it is not among the likeliest."""
    return None if token.logprob is None else {**dict(reversed(token.top)), token.text: token.logprob}
