"""OpenAI's chat completions, and the tool calls in them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from app.domain.sampling import SampleOutput, SampleRequest, TokenLogprobs
from tests.unit.app.api.chat.openai.caller import TOOLS, OpenAi, events
from tests.unit.app.api.chat.standin import CONTEXT


def test_a_chat_goes_through_the_models_template(openai: OpenAi):
    openai.standin.says("hello")
    messages = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    answer = openai.chat(messages=messages)
    text = "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n"
    (request,) = openai.standin.seen
    assert openai.standin.tokenizer.core.decode(request.prompt.tolist(), skip_special_tokens=False) == text
    assert request.max_tokens == CONTEXT - len(request.prompt)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello"}
    assert (choice["finish_reason"], answer["object"]) == ("stop", "chat.completion")


def test_an_effort_that_the_template_does_not_read_changes_nothing(openai: OpenAi):
    """The hosted service ignores it, and the cookbook's paint_rl always sends one."""
    openai.standin.says("hello")
    for effort in (None, "low", 0.5):
        openai.chat(reasoning_effort=effort)
    without, *others = (request.prompt.tolist() for request in openai.standin.seen)
    assert others == [without] * 2


def test_a_chats_tokens_are_scored_with_their_bytes(openai: OpenAi):
    def answer(_: str, request: SampleRequest) -> SampleOutput:
        top = TokenLogprobs(np.array([[64, 65], [66, 67]], np.int32), np.full((2, 2), -0.5, np.float32))
        return SampleOutput((replace(openai.standin.sequence("é", stopped=False), top=top),))

    openai.standin.answer = answer
    content = openai.chat(logprobs=True, top_logprobs=2, max_tokens=5)["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-1.0, -2.0]
    assert [entry["bytes"] for entry in content] == [None, None], "each is half a character"
    assert [top["bytes"] for top in content[0]["top_logprobs"]] == [
        list(openai.standin.tokenizer.token(token).encode()) for token in (64, 65)
    ]
    assert [request.sample_top for request in openai.standin.seen] == [2]


CALL = '<tool_call>{"name": "weather", "arguments": {"town": "Ulm"}}</tool_call>'


def test_a_tool_is_offered_and_its_call_is_read(openai: OpenAi):
    openai.standin.says(CALL)
    (choice,) = openai.chat(tools=TOOLS)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"town": "Ulm"}
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)


def test_a_streamed_call_is_no_text(openai: OpenAi):
    def answer(request_id: str, _: SampleRequest) -> SampleOutput:
        openai.standin.draw(request_id, CALL[:20])
        return SampleOutput((openai.standin.sequence(CALL),))

    openai.standin.answer = answer
    messages = [{"role": "user", "content": "?"}]
    chunks = events(openai.post("chat/completions", messages=messages, tools=TOOLS, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == ""
    (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert [call["index"] for call in calls] == [0]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("more", [{}, {"parallel_tool_calls": True}])
def test_several_calls_of_an_answer_are_all_there(openai: OpenAi, more: dict[str, bool]):
    openai.standin.says(CALL * 2)
    (choice,) = openai.chat(tools=TOOLS, **more)["choices"]
    assert len(choice["message"]["tool_calls"]) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_tool_calls_the_first_one_is_kept(openai: OpenAi, stream: bool):
    openai.standin.says(CALL + CALL.replace("Ulm", "Jena"))
    asked = {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS, "parallel_tool_calls": False}
    answer = openai.post("chat/completions", stream=stream, **asked)
    choices = [chunk["choices"][0] for chunk in events(answer)] if stream else answer.json["choices"]
    messages = [choice["delta" if stream else "message"] for choice in choices]
    (calls,) = [message["tool_calls"] for message in messages if "tool_calls" in message]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"town": "Ulm"}]
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_without_tools_a_call_is_text(openai: OpenAi):
    openai.standin.says(CALL)
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = openai.chat(**more)["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
