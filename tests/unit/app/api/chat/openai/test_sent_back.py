"""Messages that a program sends back as the installed client dumps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from openai import omit
from openai.lib._parsing._completions import parse_chat_completion
from openai.types import chat
from openai.types.chat.chat_completion_chunk import ChoiceDelta

from tests.unit.app.api.chat.openai.caller import TOOLS, OpenAi
from tests.unit.app.api.chat.openai.test_chats import CALL

ASK = {"role": "user", "content": "?"}


def created(answer: dict[str, Any]) -> chat.ChatCompletionMessage:
    return chat.ChatCompletion.model_validate(answer).choices[0].message


def parsed(answer: dict[str, Any]) -> chat.ChatCompletionMessage:
    completion = chat.ChatCompletion.model_validate(answer)
    found = parse_chat_completion(response_format=omit, input_tools=TOOLS, chat_completion=completion)
    return found.choices[0].message


def streamed(answer: dict[str, Any]) -> ChoiceDelta:
    message = answer["choices"][0]["message"]
    calls = [{**call, "index": place} for place, call in enumerate(message.get("tool_calls", []))]
    return ChoiceDelta.model_validate({**message, "tool_calls": calls} if calls else message)


@pytest.mark.parametrize("dumped", [created, parsed, streamed])
@pytest.mark.parametrize("said", ["hello", CALL])
def test_an_answer_comes_back_as_the_client_dumps_it(openai: OpenAi, dumped: Callable[..., Any], said: str):
    openai.standin.says(said)
    answer = openai.chat(tools=TOOLS)
    given = dumped(answer).model_dump()
    assert given["function_call"] is None, "the client dumps every field"
    openai.chat(messages=[ASK, answer["choices"][0]["message"], ASK], tools=TOOLS)
    openai.chat(messages=[ASK, given, ASK], tools=TOOLS)
    _, as_answered, as_dumped = openai.standin.seen
    assert as_dumped.prompt.tolist() == as_answered.prompt.tolist()


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_a_field_of_the_clients_messages_may_be_null(openai: OpenAi, role: str):
    params = getattr(chat, f"ChatCompletion{role.capitalize()}MessageParam")
    nulls = dict.fromkeys(params.__annotations__)
    openai.standin.says("hello")
    openai.chat(messages=[ASK, {**nulls, "role": role, "content": "x"}])


def test_an_unknown_field_of_a_message_may_be_null(openai: OpenAi):
    """LiteLLM and OpenRouter add such fields, which their clients dump."""
    openai.standin.says("hello")
    plain = {"role": "assistant", "content": "x"}
    openai.chat(messages=[ASK, plain, ASK])
    openai.chat(messages=[ASK, {**plain, "provider_specific_fields": None, "reasoning_details": None}, ASK])
    first, second = openai.standin.seen
    assert second.prompt.tolist() == first.prompt.tolist()
    refused = openai.post("chat/completions", messages=[ASK, {**plain, "reasoning_details": []}])
    assert (refused.status_code, "messages.1.reasoning_details" in refused.text) == (400, True), refused.text


def test_a_call_of_a_function_in_its_old_form_is_refused(openai: OpenAi):
    message = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    refused = openai.post("chat/completions", messages=[ASK, message])
    assert (refused.status_code, "messages.1.function_call: Not supp" in refused.text) == (400, True), refused.text
