"""Tool calls in what a model says, as Qwen's and Hermes' templates teach it: JSON between <tool_call> tags."""

from __future__ import annotations

import json
from dataclasses import dataclass

from app.services.openai.text import held_back

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


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
