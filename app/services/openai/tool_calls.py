"""Tool calls in generated text.

They are parsed in the form that Qwen's and Hermes' templates teach: JSON between <tool_call> tags.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from app.services.openai.generation import held_back

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call; `arguments` is JSON text."""

    name: str
    arguments: str


def are_understood(template: str) -> bool:
    """True if the template teaches the model these tags."""
    return _OPEN in template


class ToolText:
    """Separates tool calls from text. Text passes up to the first tag. Everything after it is kept until it is
    complete, because it may still turn out not to be a call."""

    def __init__(self) -> None:
        self._kept = ""

    def push(self, text: str) -> str:
        """Adds text, and returns the text that is certainly not part of a call."""
        self._kept += text
        start = self._kept.find(_OPEN)
        upto = len(self._kept) - held_back(self._kept, [_OPEN]) if start < 0 else start
        passed, self._kept = self._kept[:upto], self._kept[upto:]
        return passed

    def finish(self) -> tuple[str, list[ToolCall]]:
        """(remaining text, calls); one of the two is empty."""
        calls = parse(self._kept)
        return ("", calls) if calls else (self._kept, [])


def parse(text: str) -> list[ToolCall]:
    """The calls that make up `text`. None are returned if the text holds anything else, or a call that is not {"name":
    ..., "arguments": {...}}.

    A model may generate any text, of any length. This parser takes linear time; a regular expression took cubic time,
    and blocked all other threads.
    """
    *parts, behind = text.split(_CLOSE)
    calls = [_call(part.strip()) for part in parts]
    return [call for call in calls if call] if all(calls) and not behind.strip() else []


def _call(text: str) -> ToolCall | None:
    if not text.startswith(_OPEN):
        return None
    try:
        found = json.loads(text.removeprefix(_OPEN))
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return None
        arguments = found.get("arguments", {})
        # Python reads NaN and numbers beyond a double's range, which are no JSON.
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return ToolCall(found["name"], written) if isinstance(arguments, dict) else None
