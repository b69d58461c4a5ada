"""Answers of the Messages API: a message, or the events of its stream."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from app.services.openai.answers import AnswerHead, Count, ToolCall, ToolOptions, ToolText, Usage, merged
from app.services.openai.generation import Delta

_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class MessageForm:
    """Formats an answer of one choice (see Form). Its text is one block, which is left out if there are tool calls and
    the text before them is blank. `ids`: with the token ids of the prompt and of the answer, and the logprobs of the
    latter."""

    def __init__(self, tools: ToolOptions, *, ids: bool) -> None:
        self._tools, self._ids = tools, ids

    def whole(self, head: AnswerHead, deltas: Iterable[Delta], count: Count) -> dict[str, Any]:
        (delta,) = merged(deltas)
        text, calls = ToolText(self._tools).split(delta)
        content = [] if calls and not text.strip() else [{"type": "text", "text": text}]
        content += [{**_tool_use(call), "input": json.loads(call.arguments)} for call in calls]
        end = {**_end(delta, calls), "usage": _usage(count()), **self._tokens(delta)}
        return {**_message(head), "content": content, **end}

    def chunks(self, head: AnswerHead, deltas: Iterable[Delta], count: Count) -> Iterator[dict[str, Any]]:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": {**_message(head), **empty, "usage": _usage(count())}}
        tool_text, text, is_open = ToolText(self._tools), "", False
        seen: list[Delta] = []
        for delta in deltas:
            seen.append(delta)
            more, calls = tool_text.split(delta)
            text += more
            if not is_open and (text.strip() or (delta.finish and not calls)):
                is_open = True
                yield _block_start(0, {"type": "text", "text": ""})
            if is_open and text:
                yield _block_delta(0, {"type": "text_delta", "text": text})
                text = ""
        if is_open:
            yield _block_stop(0)
        for index, call in enumerate(calls, start=int(is_open)):
            yield _block_start(index, {**_tool_use(call), "input": {}})
            yield _block_delta(index, {"type": "input_json_delta", "partial_json": call.arguments})
            yield _block_stop(index)
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
    return {"input_tokens": used.prompt, "output_tokens": used.sampled}


def _end(last: Delta, calls: list[ToolCall]) -> dict[str, Any]:
    if calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    reason = "stop_sequence" if last.stop is not None else _REASONS[last.finish or "stop"]
    return {"stop_reason": reason, "stop_sequence": last.stop}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": call.name}


def _block_start(index: int, block: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _block_delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _block_stop(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}
