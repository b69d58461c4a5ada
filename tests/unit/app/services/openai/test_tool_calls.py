"""Recognition of tool calls in generated text, and the text that is streamed before them."""

from __future__ import annotations

import json

import pytest

from app.services.openai.tool_calls import ToolText, parse

CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Zürich"}}\n</tool_call>'


def test_every_call_is_found_with_its_arguments():
    calls = parse(f"{CALL}\n{CALL}")
    assert [call.name for call in calls] == ["weather", "weather"]
    assert json.loads(calls[0].arguments) == {"town": "Zürich"}


NO_CALLS = {
    "text behind it": f"{CALL} and more",
    "no end": CALL[:-3],
    "no JSON": "<tool_call>weather(Zürich)</tool_call>",
    "no name": '<tool_call>{"arguments": {}}</tool_call>',
    "arguments that are no object": '<tool_call>{"name": "a", "arguments": "b"}</tool_call>',
    "one of two": f"{CALL}<tool_call>?</tool_call>",
    "a list": "<tool_call>[]</tool_call>",
    "a second begin": f"<tool_call>{CALL}",
    "no number of JSON": '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
    "a number beyond all": '<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>',
    "too deep": f'<tool_call>{{"name": "a", "arguments": {"[" * 100_000}}}</tool_call>',
    # With quadratic time, let alone cubic, these would not end.
    "no end of lines": "<tool_call>" + "\n" * 1_000_000,
    "no end of begins": "<tool_call>" * 100_000,
    "nothing": "",
}


@pytest.mark.parametrize("case", NO_CALLS)
def test_what_is_no_call_stays_text(case: str):
    text = ToolText()
    shown = text.push(NO_CALLS[case])
    rest, calls = text.finish()
    assert (shown + rest, calls) == (NO_CALLS[case], [])


@pytest.mark.parametrize("size", [1, 2, 7, 200])
def test_text_before_a_call_is_shown_and_no_part_of_the_call(size: int):
    whole = f"a < b, so:\n{CALL}"
    text = ToolText()
    shown = "".join(text.push(whole[i : i + size]) for i in range(0, len(whole), size))
    rest, calls = text.finish()
    assert (shown, rest, [call.name for call in calls]) == ("a < b, so:\n", "", ["weather"])
