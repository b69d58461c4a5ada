"""The chat.completion form of an answer."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from app.services.openai.answers import Head, merged
from app.services.openai.generation import Delta, ScoredToken
from app.services.openai.tools import ToolCall, ToolText

_UNFINISHED = "\ufffd"


class ChatForm:
    """See answers.Form. tools: calls are looked for in the text."""

    def __init__(self, *, scores: bool, tools: bool) -> None:
        self._scores = scores
        self._tools = tools

    def whole(self, head: Head, deltas: Iterable[Delta]) -> dict[str, Any]:
        choices = [self._choice(delta) for delta in merged(deltas)]
        return {**_head(head, "chat.completion"), "choices": choices}

    def chunks(self, head: Head, deltas: Iterable[Delta]) -> Iterator[dict[str, Any]]:
        kept: dict[int, ToolText] = defaultdict(ToolText)
        begun: set[int] = set()
        for delta in deltas:
            role = {} if delta.choice in begun else {"role": "assistant"}
            begun.add(delta.choice)
            text, calls = self._pass(kept[delta.choice], delta)
            change = {**role, **({"content": text} if text or role else {}), **_called(calls)}
            if change or delta.tokens or delta.finish:
                yield {**self.last(head), "choices": [self._part(delta, change, calls)]}

    def last(self, head: Head) -> dict[str, Any]:
        return {**_head(head, "chat.completion.chunk"), "choices": []}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        text, calls = self._pass(ToolText(), delta)
        content = None if calls and not text.strip() else text
        message = {"role": "assistant", "content": content, **_called(calls, numbered=False)}
        return {"message": message, **self._rest(delta, calls)}

    def _part(self, delta: Delta, change: dict[str, Any], calls: list[ToolCall]) -> dict[str, Any]:
        return {"delta": change, **self._rest(delta, calls)}

    def _rest(self, delta: Delta, calls: list[ToolCall]) -> dict[str, Any]:
        logprobs = {"content": [_logprob(token) for token in delta.tokens]} if self._scores else None
        finish = "tool_calls" if calls else delta.finish
        return {"index": delta.choice, "logprobs": logprobs, "finish_reason": finish}

    def _pass(self, kept: ToolText, delta: Delta) -> tuple[str, list[ToolCall]]:
        if not self._tools:
            return delta.text, []
        text = kept.push(delta.text)
        more, calls = kept.finish() if delta.finish else ("", [])
        return text + more, calls


def _head(head: Head, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{head.request_id}", "object": kind, "created": head.created, "model": head.model}


def _called(calls: list[ToolCall], *, numbered: bool = True) -> dict[str, Any]:
    entries = [
        {
            **({"index": place} if numbered else {}),
            "id": f"call_{uuid.uuid4().hex}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for place, call in enumerate(calls)
    ]
    return {"tool_calls": entries} if entries else {}


def _logprob(token: ScoredToken) -> dict[str, Any]:
    top = [_scored(text, logprob) for text, logprob in token.top]
    return {**_scored(token.text, token.logprob), "top_logprobs": top}


def _scored(text: str, logprob: float | None) -> dict[str, Any]:
    """Half a character has no text, and its bytes are not known here."""
    return {"token": text, "logprob": logprob, "bytes": None if _UNFINISHED in text else list(text.encode())}
