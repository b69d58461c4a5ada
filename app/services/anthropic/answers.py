"""Answers of the Messages API: a message, or the events of its stream."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from app.services.openai.answer_text import AnswerText, ParseOptions
from app.services.openai.answers import AnswerHead, Count, Usage, merged
from app.services.openai.generation import Delta
from app.services.openai.tool_calls import ToolCall

_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class MessageForm:
    """Formats an answer of one choice (see Form). Its text is one block, which is left out if there are tool calls and
    the text before them is blank. `thinks`: the model's thoughts are a block before it. `ids`: with the token ids of
    the prompt and of the answer, and the logprobs of the latter."""

    def __init__(self, options: ParseOptions, *, thinks: bool, ids: bool) -> None:
        self._parsing, self._thinks, self._ids = options, thinks, ids

    def whole(self, head: AnswerHead, deltas: Iterable[Delta], count: Count) -> dict[str, Any]:
        (delta,) = merged(deltas)
        thoughts, text, calls = AnswerText(self._parsing).split(delta)
        content = [{**_EMPTY["thinking"], "thinking": thoughts}] if thoughts and self._thinks else []
        content += [] if calls and not text.strip() else [{"type": "text", "text": text}]
        content += [{**_tool_use(call), "input": json.loads(call.arguments)} for call in calls]
        end = {**_end(delta, calls), "usage": _usage(count()), **self._tokens(delta)}
        return {**_message(head), "content": content, **end}

    def chunks(self, head: AnswerHead, deltas: Iterable[Delta], count: Count) -> Iterator[dict[str, Any]]:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": {**_message(head), **empty, "usage": _usage(count())}}
        answer, blocks, text = AnswerText(self._parsing), _Blocks(), ""
        seen: list[Delta] = []
        for delta in deltas:
            seen.append(delta)
            thoughts, more, calls = answer.split(delta)
            if thoughts and self._thinks:
                yield from blocks.write("thinking", thoughts)
            text += more
            if blocks.kind == "text" or text.strip() or (delta.finish and not calls):
                yield from blocks.write("text", text)
                text = ""
        for call in calls:
            yield from blocks.call(call)
        yield from blocks.close()
        end = {"usage": _usage(count()), **self._tokens(*merged(seen))}
        yield {"type": "message_delta", "delta": _end(delta, calls), **end}
        yield {"type": "message_stop"}

    def _tokens(self, whole: Delta) -> dict[str, Any]:
        if not self._ids:
            return {}
        ids, scores = [token.id for token in whole.tokens], [token.logprob for token in whole.tokens]
        return {"prompt_token_ids": whole.prompt, "token_ids": ids, "logprobs": scores}


def _message(head: AnswerHead) -> dict[str, Any]:
    return {"id": f"msg_{head.request_id}", "type": "message", "role": "assistant", "model": head.model}


def _usage(used: Usage) -> dict[str, int]:
    """`input_tokens` are those outside the cache: the sum of all three kinds is the prompt."""
    return {
        "input_tokens": used.prompt - used.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": used.cached,
        "output_tokens": used.sampled,
    }


def _end(last: Delta, calls: list[ToolCall]) -> dict[str, Any]:
    if calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    reason = "stop_sequence" if last.stop is not None else _REASONS[last.finish or "stop"]
    return {"stop_reason": reason, "stop_sequence": last.stop}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": call.name}


_EMPTY = {"thinking": {"type": "thinking", "thinking": "", "signature": ""}, "text": {"type": "text", "text": ""}}


class _Blocks:
    """The events of a stream's blocks, one block after the other."""

    def __init__(self) -> None:
        self._index = -1
        self.kind: str | None = None

    def write(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """Adds to the present block, or to a new one of another kind."""
        if kind != self.kind:
            yield from self._open(kind, _EMPTY[kind])
        if text:
            yield self._delta({"type": f"{kind}_delta", kind: text})

    def call(self, call: ToolCall) -> Iterator[dict[str, Any]]:
        """A new block with a tool call."""
        yield from self._open("tool_use", {**_tool_use(call), "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def close(self) -> Iterator[dict[str, Any]]:
        """The end of the present block, if there is one."""
        if self.kind is not None:
            yield {"type": "content_block_stop", "index": self._index}
            self.kind = None

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.close()
        self._index, self.kind = self._index + 1, kind
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
