"""The forms of an answer: chat.completion, with its tool calls, and text_completion.

Tool calls are read as Qwen's and Hermes' templates teach them: JSON between <tool_call> tags.
"""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from app.services.openai.generation import Delta, ScoredToken, held_back

_UNFINISHED = "\ufffd"

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Head:
    """`id` ends with the request id of the first prompt, as logs and Flower show it."""

    request_id: str
    created: int
    model: str


class Form(Protocol):
    """How a kind of answer is written."""

    def whole(self, head: Head, deltas: Iterable[Delta]) -> dict[str, Any]:
        """All at once."""
        ...

    def chunks(self, head: Head, deltas: Iterable[Delta]) -> Iterator[dict[str, Any]]:
        """One by one, as the deltas come."""
        ...

    def last(self, head: Head) -> dict[str, Any]:
        """A chunk without choices, for the usage."""
        ...


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """One for each choice, in order."""
    choices: dict[int, list[Delta]] = {}
    for delta in deltas:
        choices.setdefault(delta.choice, []).append(delta)
    return [_joined(index, parts) for index, parts in sorted(choices.items())]


def usage(prompt: int, sampled: int) -> Mapping[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _joined(index: int, parts: list[Delta]) -> Delta:
    tokens = tuple(chain.from_iterable(part.tokens for part in parts))
    return Delta(index, "".join(part.text for part in parts), tokens, parts[-1].finish)


class ChatForm:
    """See answers.Form. tools: calls are looked for in the text."""

    def __init__(self, *, scores: bool, tools: bool) -> None:
        self._scores = scores
        self._tools = tools

    def whole(self, head: Head, deltas: Iterable[Delta]) -> dict[str, Any]:
        choices = [self._choice(delta) for delta in merged(deltas)]
        return {**_chat_head(head, "chat.completion"), "choices": choices}

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
        return {**_chat_head(head, "chat.completion.chunk"), "choices": []}

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


def _chat_head(head: Head, kind: str) -> dict[str, Any]:
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


class CompletionForm:
    """See answers.Form. top: how many of the likeliest tokens were asked for; None for no logprobs at all."""

    def __init__(self, top: int | None) -> None:
        self._top = top

    def whole(self, head: Head, deltas: Iterable[Delta]) -> dict[str, Any]:
        return {**_completion_head(head), "choices": [self._choice(delta) for delta in merged(deltas)]}

    def chunks(self, head: Head, deltas: Iterable[Delta]) -> Iterator[dict[str, Any]]:
        for delta in deltas:
            yield {**_completion_head(head), "choices": [self._choice(delta)]}

    def last(self, head: Head) -> dict[str, Any]:
        return {**_completion_head(head), "choices": []}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        logprobs = None if self._top is None else _logprobs(delta.tokens, with_top=self._top > 0)
        return {"index": delta.choice, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish}


def _completion_head(head: Head) -> dict[str, Any]:
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


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is JSON text."""

    name: str
    arguments: str


def are_understood(template: str) -> bool:
    """Whether the model is told of these tags."""
    return _OPEN in template


class ToolText:
    """Lets text pass up to the first tag. What follows is kept until it is whole, since it may be no call after all."""

    def __init__(self) -> None:
        self._kept = ""

    def push(self, text: str) -> str:
        """What is sure to be no call."""
        self._kept += text
        start = self._kept.find(_OPEN)
        upto = len(self._kept) - held_back(self._kept, [_OPEN]) if start < 0 else start
        passed, self._kept = self._kept[:upto], self._kept[upto:]
        return passed

    def finish(self) -> tuple[str, list[ToolCall]]:
        """(further text, calls): the one or the other."""
        calls = parse(self._kept)
        return ("", calls) if calls else (self._kept, [])


def parse(text: str) -> list[ToolCall]:
    """The calls `text` consists of; none if it holds anything else, or a call that is not {"name": ..., "arguments":
    {...}}.

    A model may say anything for long. This takes time in proportion to it; a regular expression took that to the power
    of three, and held up all other threads.
    """
    *parts, behind = text.split(_CLOSE)
    calls = [_call(part.strip()) for part in parts]
    return [call for call in calls if call] if all(calls) and not behind.strip() else []


def _call(text: str) -> ToolCall | None:
    if not text.startswith(_OPEN):
        return None
    try:
        found = json.loads(text.removeprefix(_OPEN))
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    return ToolCall(found["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
