"""Tool calls of a model with another form than Qwen's, for OpenAI's and for Anthropic's clients."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from app.domain.sampling import SampleOutput, SampleRequest
from tests.tokenizers import PLAIN
from tests.unit.app.api.chat.anthropic.caller import TOOL, Anthropic, assembled
from tests.unit.app.api.chat.openai.caller import TOOLS, OpenAi, events
from tests.unit.app.api.chat.standin import Standin

TAG = "<|python_tag|>"
CALL = '{"name": "weather", "parameters": {"town": "Ulm"}}'
ANSWER = f"Let me see.{TAG}{CALL}"


@pytest.fixture(scope="module")
def template() -> str:
    """A template that teaches Llama's form."""
    return '{{ \'Respond in the format {"name": function name, "parameters": dictionary}.\' }}' + PLAIN


@pytest.fixture(scope="module")
def special() -> Sequence[str]:
    return (TAG,)


def say(standin: Standin, text: str) -> None:
    """An answer that is streamed up to the middle of its call."""

    def answer(request_id: str, _: SampleRequest) -> SampleOutput:
        standin.draw(request_id, text[:40])
        return SampleOutput((standin.sequence(text),))

    standin.answer = answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_behind_a_special_token_is_read(openai: OpenAi, stream: bool):
    say(openai.standin, ANSWER)
    asked = {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS, "stream": stream}
    answer = openai.post("chat/completions", **asked)
    choices = [chunk["choices"][0] for chunk in events(answer)] if stream else answer.json["choices"]
    messages = [choice["delta" if stream else "message"] for choice in choices]
    assert "".join(message.get("content") or "" for message in messages) == "Let me see."
    ((call,),) = [message["tool_calls"] for message in messages if "tool_calls" in message]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"town": "Ulm"})
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_it_is_a_block_of_a_message(anthropic: Anthropic, stream: bool):
    say(anthropic.standin, ANSWER)
    asked = {"tools": [TOOL]}
    answer = assembled(anthropic.events(**asked)) if stream else anthropic.message(**asked)
    text, call = answer["content"]
    assert (text["text"], call["name"], call["input"]) == ("Let me see.", "weather", {"town": "Ulm"})
    assert answer["stop_reason"] == "tool_use"


def test_the_special_token_is_text_only_where_tools_are_offered(openai: OpenAi):
    said = f"{TAG}print(1)"
    openai.standin.says(said)
    assert openai.chat(tools=TOOLS)["choices"][0]["message"]["content"] == said
    assert openai.chat()["choices"][0]["message"]["content"] == "print(1)"
