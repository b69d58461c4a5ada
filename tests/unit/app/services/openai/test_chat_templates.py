"""Ids of tool calls, for templates that take only short ones."""

from __future__ import annotations

from typing import Any

from app.services.openai.chat_templates import _SHORT_IDS, fit_call_ids

MESSAGES: list[dict[str, Any]] = [
    {"role": "assistant", "tool_calls": [{"id": "call_0123456789", "type": "function"}, {"type": "function"}]},
    {"role": "tool", "tool_call_id": "call_0123456789", "content": "dry"},
]


def test_a_call_and_its_result_get_the_same_short_id() -> None:
    called, result = fit_call_ids(MESSAGES, f"{{# {_SHORT_IDS} #}}")
    assert called["tool_calls"] == [{"id": result["tool_call_id"], "type": "function"}, {"type": "function"}]
    assert len(result["tool_call_id"]) == 9


def test_other_templates_get_the_ids_as_they_are() -> None:
    assert fit_call_ids(MESSAGES, "{{ messages }}") == MESSAGES
