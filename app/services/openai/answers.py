"""Answer formats: chat.completion, with its tool calls, and text_completion."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

from app.services.openai.answer_text import AnswerText, ParseOptions
from app.services.openai.generation import Delta, ScoredToken
from app.services.openai.tool_calls import ToolCall

_UNFINISHED = "\ufffd"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields common to all parts of an answer. The answer's `id` ends with the request id of the first prompt, as
    logs and Flower show it."""

    request_id: str
    created: int
    model: str


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of a call's prompts, those sampled, and those of the prompts that were not computed again."""

    prompt: int
    sampled: int
    cached: int


Count = Callable[[], Usage]
"""Returns the usage of a call. The sampled and the cached tokens are all counted after the last delta."""


class Form(Protocol):
    """The format of one kind of answer."""

    def whole(self, head: AnswerHead, deltas: Iterable[Delta], count: Count) -> dict[str, Any]:
        """The whole answer at once."""
        ...

    def chunks(self, head: AnswerHead, deltas: Iterable[Delta], count: Count) -> Iterator[dict[str, Any]]:
        """The answer's chunks one by one, as the deltas come."""
        ...


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """One merged delta for each choice, in order."""
    choices: dict[int, list[Delta]] = {}
    for delta in deltas:
        choices.setdefault(delta.choice, []).append(delta)
    return [_joined(index, parts) for index, parts in sorted(choices.items())]


def _usage(used: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": used.prompt,
        "completion_tokens": used.sampled,
        "total_tokens": used.prompt + used.sampled,
    }


def _last_with_usage(chunks: Iterable[dict[str, Any]], head: dict[str, Any], count: Count) -> Iterator[dict[str, Any]]:
    """The chunks, and one more without choices, which carries the usage."""
    for chunk in chunks:
        yield {**chunk, "usage": None}
    yield {**head, "choices": [], "usage": _usage(count())}


def _joined(index: int, parts: list[Delta]) -> Delta:
    tokens = tuple(chain.from_iterable(part.tokens for part in parts))
    text = "".join(part.text for part in parts)
    return replace(parts[-1], choice=index, text=text, tokens=tokens, prompt=parts[0].prompt)


def _ids(delta: Delta) -> list[int]:
    return [token.id for token in delta.tokens]


class ChatForm:
    """Formats chat answers (see Form). `scores`: with logprobs. `ids`: with token ids, in the fields that vLLM's server
    has. `with_usage`: a stream ends with its usage."""

    def __init__(self, options: ParseOptions, *, scores: bool, ids: bool, with_usage: bool) -> None:
        self._parsing, self._scores, self._ids, self._with_usage = options, scores, ids, with_usage

    def whole(self, head: AnswerHead, deltas: Iterable[Delta], count: Count) -> dict[str, Any]:
        found = merged(deltas)
        choices = [self._choice(delta) for delta in found]
        shown = {**_chat_head(head, "chat.completion"), **_prompt_ids(found[0])}
        return {**shown, "choices": choices, "usage": _usage(count())}

    def chunks(self, head: AnswerHead, deltas: Iterable[Delta], count: Count) -> Iterator[dict[str, Any]]:
        shown = _chat_head(head, "chat.completion.chunk")
        chunks = self._chunks(shown, deltas)
        return _last_with_usage(chunks, shown, count) if self._with_usage else chunks

    def _chunks(self, head: dict[str, Any], deltas: Iterable[Delta]) -> Iterator[dict[str, Any]]:
        kept: dict[int, AnswerText] = defaultdict(lambda: AnswerText(self._parsing))
        begun: set[int] = set()
        for delta in deltas:
            role = {} if delta.choice in begun else {"role": "assistant"}
            begun.add(delta.choice)
            thoughts, text, calls = kept[delta.choice].split(delta)
            content = {"content": text} if text or role else {}
            change = {**role, **_thought(thoughts), **content, **_called(calls)}
            if change or delta.tokens or delta.finish:
                first = _prompt_ids(delta) if len(begun) == 1 else {}
                yield {**head, **first, "choices": [{"delta": change, **self._rest(delta, calls)}]}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        thoughts, text, calls = AnswerText(self._parsing).split(delta)
        content = None if calls and not text.strip() else text
        message = {"role": "assistant", **_thought(thoughts), "content": content, **_called(calls, numbered=False)}
        return {"message": message, **self._rest(delta, calls)}

    def _rest(self, delta: Delta, calls: list[ToolCall]) -> dict[str, Any]:
        logprobs = {"content": [_logprob(token) for token in delta.tokens]} if self._scores else None
        finish = "tool_calls" if calls else delta.finish
        ids = {"token_ids": _ids(delta)} if self._ids else {}
        return {"index": delta.choice, "logprobs": logprobs, "finish_reason": finish, **ids}


def _prompt_ids(delta: Delta) -> dict[str, Any]:
    return {} if delta.prompt is None else {"prompt_token_ids": delta.prompt}


def _chat_head(head: AnswerHead, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{head.request_id}", "object": kind, "created": head.created, "model": head.model}


def _thought(thoughts: str) -> dict[str, Any]:
    """The field of the thoughts, under the name that vLLM gives it and the one that DeepSeek gives it."""
    return {"reasoning": thoughts, "reasoning_content": thoughts} if thoughts else {}


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
    """A token and its logprob. Half a character has no text, and its bytes are not known here."""
    return {"token": text, "logprob": logprob, "bytes": None if _UNFINISHED in text else list(text.encode())}


class CompletionForm:
    """Formats completion answers (see Form). `top`: the number of most likely tokens requested; None for no logprobs at
    all. `ids` and `with_usage` are those of ChatForm."""

    def __init__(self, top: int | None, *, ids: bool, with_usage: bool) -> None:
        self._top, self._ids, self._with_usage = top, ids, with_usage

    def whole(self, head: AnswerHead, deltas: Iterable[Delta], count: Count) -> dict[str, Any]:
        choices = [self._choice(delta) for delta in merged(deltas)]
        return {**_completion_head(head), "choices": choices, "usage": _usage(count())}

    def chunks(self, head: AnswerHead, deltas: Iterable[Delta], count: Count) -> Iterator[dict[str, Any]]:
        shown = _completion_head(head)
        chunks = ({**shown, "choices": [self._choice(delta)]} for delta in deltas)
        return _last_with_usage(chunks, shown, count) if self._with_usage else chunks

    def _choice(self, delta: Delta) -> dict[str, Any]:
        logprobs = None if self._top is None else _logprobs(delta.tokens, with_top=self._top > 0)
        ids = {"token_ids": _ids(delta), **_prompt_ids(delta)} if self._ids else {}
        return {"index": delta.choice, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish, **ids}


def _completion_head(head: AnswerHead) -> dict[str, Any]:
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
    """The most likely tokens with their logprobs. The sampled token is included even if it is not among them."""
    return None if token.logprob is None else {**dict(reversed(token.top)), token.text: token.logprob}
