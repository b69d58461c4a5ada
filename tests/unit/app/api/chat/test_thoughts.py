"""A model that thinks, for OpenAI's and for Anthropic's clients."""

from __future__ import annotations

from typing import Any

import pytest

from app.domain.sampling import SampleOutput, SampleRequest
from tests.unit.app.api.chat.anthropic.caller import ASK, Anthropic
from tests.unit.app.api.chat.openai.caller import OpenAi, events
from tests.unit.app.api.chat.standin import Standin
from tests.unit.app.conftest import Api

ANSWER = "<think>\nhm\n</think>\n\nyes"
EMPTY = "<think>\n\n</think>\n\n"
BEGUN = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def template() -> str:
    """A template that thinks unless told otherwise, as Qwen3's."""
    return (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
        "{{ message.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
        "{% if opens %}<think>\n{% endif %}"
    )


@pytest.fixture
def openai(served: tuple[Api, Standin]) -> OpenAi:
    return OpenAi(*served)


@pytest.fixture
def anthropic(served: tuple[Api, Standin]) -> Anthropic:
    return Anthropic(*served)


def prompts(standin: Standin) -> list[str]:
    return [standin.tokenizer.core.decode(seen.prompt.tolist(), skip_special_tokens=False) for seen in standin.seen]


def test_thoughts_are_a_field_beside_the_answer(openai: OpenAi):
    openai.standin.says(ANSWER)
    (choice,) = openai.chat()["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "reasoning": "hm",
        "reasoning_content": "hm",
        "content": "yes",
    }


def test_a_stream_has_them_before_the_answer(openai: OpenAi):
    def answer(request_id: str, _: SampleRequest) -> SampleOutput:
        openai.standin.draw(request_id, ANSWER[:13])
        return SampleOutput((openai.standin.sequence(ANSWER),))

    openai.standin.answer = answer
    messages = [{"role": "user", "content": "?"}]
    chunks = events(openai.post("chat/completions", messages=messages, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "yes"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("separate", "content"), [(True, "yes"), (None, "yes"), (False, ANSWER)])
def test_a_caller_may_want_them_in_the_text_as_the_model_wrote_them(
    openai: OpenAi, stream: bool, separate: bool | None, content: str
):
    openai.standin.says(ANSWER)
    messages = [{"role": "user", "content": "?"}]
    answer = openai.post("chat/completions", messages=messages, stream=stream, separate_reasoning=separate)
    choices = [chunk["choices"][0] for chunk in events(answer)] if stream else answer.json["choices"]
    parts = [choice["delta" if stream else "message"] for choice in choices]
    assert "".join(part.get("content", "") for part in parts) == content
    assert any("reasoning_content" in part for part in parts) == (content == "yes")


@pytest.mark.parametrize("given", [{}, {"enable_thinking": True}])
def test_the_template_has_the_variables_of_the_caller(openai: OpenAi, given: dict[str, Any]):
    openai.standin.says("yes")
    openai.chat(chat_template_kwargs=given)
    openai.chat(chat_template_kwargs={"enable_thinking": False, "eos_token": "x"})
    thinks, does_not = prompts(openai.standin)
    assert thinks.endswith(BEGUN)
    assert does_not == thinks + EMPTY


@pytest.mark.usefixtures("follows_schemas")
def test_an_answer_that_follows_a_schema_has_none(openai: OpenAi):
    openai.standin.says('{"a": 1}')
    for response_format, name in (({"type": "text"}, "reasoning"), ({"type": "json_object"}, "content")):
        answer = openai.chat(response_format=response_format, chat_template_kwargs={"opens": True})
        assert answer["choices"][0]["message"][name] == '{"a": 1}'


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_earlier_thoughts_are_in_the_prompt(openai: OpenAi, name: str):
    openai.standin.says("yes")
    turns = [{"role": "assistant", "content": "no", name: "hm"}, {"role": "user", "content": "?"}]
    openai.chat(messages=turns)
    assert "assistant\n<think>\nhm\n</think>\n\nno<|im_end|>" in prompts(openai.standin)[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_has_them_as_a_block_where_they_are_asked_for(anthropic: Anthropic, stream: bool):
    anthropic.standin.says(ANSWER)
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
        if stream:
            found = anthropic.events(thinking=thinking)
            blocks = [event["content_block"]["type"] for event in found if event["type"] == "content_block_start"]
            deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
            assert "".join(delta.get("thinking", "") for delta in deltas) == "hm"
            assert "".join(delta.get("text", "") for delta in deltas) == "yes"
            assert [event["index"] for event in found if event["type"] == "content_block_stop"] == [0, 1]
        else:
            thought, text = anthropic.message(thinking=thinking)["content"]
            assert (thought["thinking"], text["text"]) == ("hm", "yes")
            blocks = [thought["type"], text["type"]]
        assert blocks == ["thinking", "text"]
        assert anthropic.prompt().endswith(BEGUN)


def test_without_thinking_a_message_has_none(anthropic: Anthropic):
    anthropic.standin.says(ANSWER)
    for more in ({}, {"thinking": {"type": "disabled"}}):
        assert anthropic.message(**more)["content"] == [{"type": "text", "text": "yes"}]
        assert anthropic.prompt().endswith(EMPTY)


def test_earlier_thoughts_of_a_message_are_in_the_prompt(anthropic: Anthropic):
    anthropic.standin.says("yes")
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    turn = {"role": "assistant", "content": [thought, {"type": "text", "text": "no"}]}
    anthropic.message(messages=[*ASK, turn, *ASK])
    assert "assistant\n<think>\nhm\n</think>\n\nno<|im_end|>" in anthropic.prompt()
