"""A model that answers in harmony, as gpt-oss does, for OpenAI's and for Anthropic's clients."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from app.domain.sampling import SampleOutput, SampleRequest
from app.services.openai.harmony import TAGS
from tests.unit.app.api.chat.anthropic.caller import ASK, TOOL, Anthropic
from tests.unit.app.api.chat.openai.caller import TOOLS, OpenAi, events
from tests.unit.app.api.chat.standin import Standin

THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
SAID = "<|channel|>commentary<|message|>wait<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"town": "Ulm"}<|call|>'
FINAL = "<|channel|>final<|message|>yes<|return|>"
FIRST = 258  # the id of the first tag
END = "<|start|>assistant"


@pytest.fixture(scope="module")
def template() -> str:
    """A template with the fields, and the refusal, of those of gpt-oss."""
    return (
        "Effort: {% if adds %}{{ '' + reasoning_effort }}{% endif %}{{ reasoning_effort or 'medium' }}\n"
        "{% set last = namespace(name='') %}"
        "{% for message in messages %}{% if message.role == 'tool' %}"
        "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>"
        "{{ message.content | tojson }}<|end|>"
        "{% elif message.role != 'assistant' %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>"
        "{% elif message.tool_calls %}"
        "{% if message.content and message.thinking %}{{ raise_exception('either thoughts or a text') }}{% endif %}"
        "{% if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>"
        "{% endif %}{% set call = message.tool_calls[0].function %}{% set last.name = call.name %}"
        "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
        "{{ call.arguments | tojson }}<|call|>"
        "{% else %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )


@pytest.fixture(scope="module")
def special() -> Sequence[str]:
    return TAGS


def say(standin: Standin, text: str) -> None:
    """An answer with its end token, which is streamed token by token up to the middle of its last message."""
    tokens = standin.tokenizer.encode(text)
    place = len(tokens) - 8

    def answer(request_id: str, _: SampleRequest) -> SampleOutput:
        for at in range(place):
            one = standin.tokenizer.core.decode(tokens[at : at + 1].tolist(), skip_special_tokens=False)
            standin.draw(request_id, one, at)
        return SampleOutput((replace(standin.sequence(text, stopped=False), stopped=True),))

    standin.answer = answer


def message_of(openai: OpenAi, stream: bool, **asked: Any) -> tuple[dict[str, Any], str]:
    """The message of an answer, and its finish_reason."""
    answer = openai.post("chat/completions", messages=ASK, stream=stream, **asked)
    choices = [chunk["choices"][0] for chunk in events(answer)] if stream else answer.json["choices"]
    parts = [choice["delta" if stream else "message"] for choice in choices]
    names = ("reasoning", "reasoning_content", "content")
    texts = {name: "".join(part.get(name) or "" for part in parts) for name in names}
    calls = [call["function"] for part in parts for call in part.get("tool_calls", [])]
    found = [(call["name"], json.loads(call["arguments"])) for call in calls]
    return {**texts, "calls": found}, choices[-1]["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_and_the_text_are_apart(openai: OpenAi, stream: bool):
    say(openai.standin, THOUGHT + FINAL)
    expected = {"reasoning": "hm", "reasoning_content": "hm", "content": "yes", "calls": []}
    assert message_of(openai, stream) == (expected, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_apart_from_the_text_before_it(openai: OpenAi, stream: bool):
    say(openai.standin, THOUGHT + SAID + CALL)
    calls = [("weather", {"town": "Ulm"})]
    expected = {"reasoning": "hm", "reasoning_content": "hm", "content": "wait", "calls": calls}
    assert message_of(openai, stream, tools=TOOLS) == (expected, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_has_a_block_for_each_kind(anthropic: Anthropic, stream: bool):
    say(anthropic.standin, THOUGHT + SAID + CALL)
    asked = {"tools": [TOOL], "thinking": {"type": "adaptive"}}
    if stream:
        found = anthropic.events(**asked)
        blocks = [event["content_block"]["type"] for event in found if event["type"] == "content_block_start"]
        deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
        names = ("thinking", "text", "partial_json")
        texts = ["".join(delta.get(name, "") for delta in deltas) for name in names]
        reason = found[-2]["delta"]["stop_reason"]
    else:
        answer = anthropic.message(**asked)
        (thought, text, call), reason = answer["content"], answer["stop_reason"]
        blocks = [thought["type"], text["type"], call["type"]]
        texts = [thought["thinking"], text["text"], json.dumps(call["input"])]
    assert (blocks, texts) == (["thinking", "text", "tool_use"], ["hm", "wait", '{"town": "Ulm"}'])
    assert reason == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_that_are_not_asked_for_are_left_out(anthropic: Anthropic, stream: bool):
    say(anthropic.standin, THOUGHT + FINAL)
    if stream:
        deltas = [event["delta"] for event in anthropic.events() if event["type"] == "content_block_delta"]
        assert "".join(delta["text"] for delta in deltas) == "yes"
    else:
        assert anthropic.message()["content"] == [{"type": "text", "text": "yes"}]


def test_a_call_or_a_return_ends_the_answer(openai: OpenAi):
    say(openai.standin, FINAL)
    openai.chat(stop=[str(place) for place in range(64)])
    openai.completion()
    chat, completion = openai.standin.seen
    assert chat.stop_tokens == (FIRST + TAGS.index("<|return|>"), FIRST + TAGS.index("<|call|>"))
    assert completion.stop_tokens == ()


def test_earlier_turns_are_in_the_fields_of_the_template(anthropic: Anthropic):
    say(anthropic.standin, FINAL)
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    uses = [{"type": "tool_use", "id": name, "name": name, "input": {"town": "Ulm"}} for name in ("f", "g")]
    results = [{"type": "tool_result", "tool_use_id": name, "content": f"of {name}"} for name in ("f", "g")]
    asked = [thought, {"type": "text", "text": "wait"}, *uses]
    anthropic.message(messages=[*ASK, {"role": "assistant", "content": asked}, {"role": "user", "content": results}])
    text = anthropic.prompt().partition("<|message|>hi<|end|>")[2]
    assert text == (
        "<|start|>assistant<|channel|>analysis<|message|>hm\nwait<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"town": "Ulm"}<|call|>'
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"of f"<|end|>'
        '<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{"town": "Ulm"}<|call|>'
        f'<|start|>functions.g to=assistant<|channel|>commentary<|message|>"of g"<|end|>{END}'
    )


def test_a_message_of_a_client_comes_back_as_it_is(openai: OpenAi):
    say(openai.standin, THOUGHT + SAID + CALL)
    message = openai.chat(tools=TOOLS)["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sun"}
    openai.chat(messages=[*ASK, message, result], tools=TOOLS)


def test_an_answer_that_the_client_begins_is_a_final_message(anthropic: Anthropic):
    say(anthropic.standin, "s<|return|>")
    answer = anthropic.message(messages=[*ASK, {"role": "assistant", "content": "ye"}])
    assert anthropic.prompt().endswith(f"{END}<|channel|>final<|message|>ye")
    assert answer["content"] == [{"type": "text", "text": "s"}]


def test_a_client_may_begin_the_thoughts_with_a_tag(anthropic: Anthropic):
    say(anthropic.standin, f"m<|end|><|start|>assistant{FINAL}")
    begun = {"role": "assistant", "content": "<|channel|>analysis<|message|>h"}
    answer = anthropic.message(messages=[*ASK, begun], thinking={"type": "adaptive"})
    assert anthropic.prompt().endswith(f"{END}<|channel|>analysis<|message|>h")
    thought, text = answer["content"]
    assert (thought["thinking"], text["text"]) == ("m", "yes")


@pytest.mark.usefixtures("follows_schemas")
def test_json_is_a_final_message_without_thoughts(openai: OpenAi, anthropic: Anthropic):
    say(openai.standin, '{"a": 1}<|return|>')
    answer = openai.chat(response_format={"type": "json_object"})
    assert answer["choices"][0]["message"]["content"] == '{"a": 1}'
    assert anthropic.prompt().endswith(f"{END}<|channel|>final<|message|>")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    anthropic.message(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert anthropic.prompt().endswith(f"{END}<|channel|>final<|message|>")


def test_thoughts_on_a_channel_of_their_own_stay_separate(openai: OpenAi):
    say(openai.standin, THOUGHT + FINAL)
    assert openai.chat(separate_reasoning=True)["choices"][0]["message"]["reasoning_content"] == "hm"
    refused = openai.post("chat/completions", messages=ASK, separate_reasoning=False)
    assert (refused.status_code, "separate_reasoning must be true" in refused.text) == (400, True), refused.text


def test_the_effort_is_a_variable_of_the_template(openai: OpenAi, anthropic: Anthropic):
    say(openai.standin, FINAL)
    asked = {None: "medium", "high": "high", "max": "max", 0.25: "0.25", 1: "1.0"}
    efforts = []
    for effort in asked:
        openai.chat(reasoning_effort=effort)
        efforts.append(anthropic.prompt().partition("\n")[0])
    assert efforts == [f"Effort: {effort}" for effort in asked.values()]


def test_the_effort_of_anthropics_clients_is_one_that_the_model_knows(anthropic: Anthropic):
    say(anthropic.standin, FINAL)
    asked = {None: "medium", "low": "low", "high": "high", "xhigh": "high", "max": "high"}
    efforts = []
    for effort in asked:
        anthropic.message(output_config={"effort": effort})
        efforts.append(anthropic.prompt().partition("\n")[0])
    assert efforts == [f"Effort: {effort}" for effort in asked.values()]


def test_a_template_that_adds_names_refuses_a_number(openai: OpenAi):
    say(openai.standin, FINAL)
    refused = openai.post("chat/completions", messages=ASK, reasoning_effort=0.5, chat_template_kwargs={"adds": True})
    assert (refused.status_code, "chat template cannot take" in refused.text) == (400, True), refused.text
