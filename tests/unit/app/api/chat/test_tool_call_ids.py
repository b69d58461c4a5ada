"""Tool calls of a model whose template refuses ids that are not 9 characters long, as Mistral's do."""

from __future__ import annotations

import re

import pytest

from tests.unit.app.api.chat.anthropic.caller import ASK, TOOL, Anthropic
from tests.unit.app.api.chat.openai.caller import TOOLS, OpenAi

CALL = '[TOOL_CALLS] [{"name": "weather", "arguments": {"town": "Ulm"}}]'
NINE = '{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}'


@pytest.fixture(scope="module")
def template() -> str:
    """The rule, and the form of calls, of Mistral-7B-Instruct-v0.3."""
    return (
        "{%- for message in messages %}{%- if message.tool_calls is defined %}"
        '{{- "[TOOL_CALLS] [" }}{%- for tool_call in message.tool_calls %}'
        f"{{%- if not tool_call.id is defined or tool_call.id|length != 9 %}}{NINE}{{%- endif %}}"
        '{{- tool_call.function|tojson }}{{- \', "id": "\' + tool_call.id + \'"}\' }}{%- endfor %}{{- "]" }}'
        '{%- elif message.role == "tool" %}'
        f"{{%- if not message.tool_call_id is defined or message.tool_call_id|length != 9 %}}{NINE}{{%- endif %}}"
        "{{- '[TOOL_RESULTS] {\"call_id\": \"' + message.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
        "{%- else %}{{- message.content }}{%- endif %}{%- endfor %}"
    )


def ids_in(prompt: str) -> list[str]:
    """The ids of the calls and results in a prompt."""
    return re.findall(r'"(?:id|call_id)": "(.*?)"', prompt)


def prompt_of(openai: OpenAi) -> str:
    return openai.standin.tokenizer.core.decode(openai.standin.seen[-1].prompt.tolist(), skip_special_tokens=False)


def test_a_call_and_its_result_go_back_to_the_model(openai: OpenAi):
    openai.standin.says(CALL)
    asked = {"role": "user", "content": "?"}
    message = openai.chat(messages=[asked], tools=TOOLS)["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sun"}
    openai.chat(messages=[asked, message, result], tools=TOOLS)
    first, second = ids_in(prompt_of(openai))
    assert first == second
    assert re.fullmatch("[0-9a-f]{9}", first)


def test_a_block_and_its_result_go_back_to_the_model(anthropic: Anthropic):
    anthropic.standin.says(CALL)
    used = anthropic.message(tools=[TOOL])["content"]
    result = [{"type": "tool_result", "tool_use_id": used[0]["id"], "content": "sun"}]
    turns = [*ASK, {"role": "assistant", "content": used}, {"role": "user", "content": result}]
    anthropic.message(messages=turns, tools=[TOOL])
    first, second = ids_in(anthropic.prompt())
    assert first == second
    assert re.fullmatch("[0-9a-f]{9}", first)


def test_ids_of_nine_characters_stay_and_others_stay_apart(openai: OpenAi):
    openai.standin.says("ok")
    ids = ["abcDEF123", "call_1", "call_2"]
    calls = [{"id": one, "type": "function", "function": {"name": "f", "arguments": "{}"}} for one in ids]
    results = [{"role": "tool", "tool_call_id": one, "content": "sun"} for one in ids]
    openai.chat(messages=[{"role": "assistant", "tool_calls": calls}, *results])
    found = ids_in(prompt_of(openai))
    assert found[:3] == found[3:]
    assert (found[0], len(set(found))) == ("abcDEF123", 3)


def test_a_call_without_an_id_is_refused_with_the_templates_words(openai: OpenAi):
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    answer = openai.post("chat/completions", messages=[{"role": "assistant", "tool_calls": calls}])
    assert answer.status_code == 400
    assert "length 9" in answer.json["error"]["message"]
