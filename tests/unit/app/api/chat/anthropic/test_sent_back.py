"""Messages that a program sends back as the installed client dumps them."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic import types
from anthropic.types import beta

from tests.unit.app.api.chat.anthropic.caller import ASK, CALL, TOOL, Anthropic

THOUGHT = {"type": "thinking", "thinking": "hm", "signature": ""}


@pytest.mark.parametrize("model", [types.Message, types.ParsedMessage, beta.BetaMessage])
def test_an_answer_comes_back_as_the_client_dumps_it(anthropic: Anthropic, model: Any):
    anthropic.standin.says(f"Let me see.{CALL}")
    answer = anthropic.message(tools=[TOOL])
    answer["content"].insert(0, THOUGHT)
    given = model.model_validate(answer).model_dump()["content"]
    assert given[1]["citations"] is None, "the client dumps every field"
    assert [block["type"] for block in given] == ["thinking", "text", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": answer["content"][2]["id"], "content": "sun"}
    for blocks in (answer["content"], given):
        turns = [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
        anthropic.message(messages=[*ASK, *turns], tools=[TOOL])
    _, as_answered, as_dumped = anthropic.standin.seen
    assert as_dumped.prompt.tolist() == as_answered.prompt.tolist()
