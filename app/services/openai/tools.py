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
    {...}}."""
    *parts, rest = text.split(_CLOSE)  # no pattern: what a model says may take one for ever
    inner = [part.strip() for part in parts]
    if rest.strip() or not all(part.startswith(_OPEN) for part in inner):
        return []
    calls = [_call(part.removeprefix(_OPEN).strip()) for part in inner]
    return [call for call in calls if call] if all(calls) else []


def _call(text: str) -> ToolCall | None:
    try:
        found = json.loads(text)
        name, arguments = found["name"], found.get("arguments", {})
        if isinstance(name, str) and isinstance(arguments, dict):
            return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        pass
    return None
