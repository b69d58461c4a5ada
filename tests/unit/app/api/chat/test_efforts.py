"""The effort of Anthropic's clients, for a model that refuses some efforts, as Qwen3.8 does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.app.api.chat.anthropic.caller import ASK, Anthropic
from tests.unit.app.api.chat.openai.caller import OpenAi


@pytest.fixture(scope="module")
def template() -> str:
    return (
        "{% set effort = reasoning_effort | default('xhigh') %}"
        "{% if effort is string and effort not in ('low', 'medium', 'xhigh') %}"
        "{{ raise_exception('Unexpected effort ' ~ effort) }}{% endif %}Effort: {{ effort }}\n"
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if messages[0].content == 'bad' %}{{ raise_exception('a bad message') }}{% endif %}"
    )


@pytest.mark.parametrize(
    ("effort", "in_prompt"),
    [
        *(("low", "low"), ("medium", "medium"), ("xhigh", "xhigh"), ("max", "xhigh"), (0.25, "0.25")),
        *((effort, "xhigh") for effort in ("high", "minimal", None, "heroic", 5, True, ["low"], {})),
    ],
)
def test_an_effort_reaches_a_template_that_takes_it_and_never_fails(anthropic: Anthropic, effort: Any, in_prompt: str):
    anthropic.standin.says("hello")
    asked = {"output_config": {"effort": effort}}
    count = anthropic.post("messages/count_tokens", **asked).json["input_tokens"]
    anthropic.message(**asked)
    assert anthropic.prompt() == f"Effort: {in_prompt}\nuser: hi\n"
    assert count == len(anthropic.standin.seen[0].prompt)


def test_messages_that_a_template_refuses_are_a_400_with_an_effort_too(anthropic: Anthropic):
    messages = [{**ASK[0], "content": "bad"}]
    for more in ({}, {"output_config": {"effort": "low"}}):
        refused = anthropic.post(messages=messages, **more)
        assert (refused.status_code, "a bad message" in refused.text) == (400, True), refused.text


def test_openais_effort_fails_where_the_template_refuses_it(openai: OpenAi):
    refused = openai.post("chat/completions", messages=ASK, reasoning_effort="high")
    assert (refused.status_code, "Unexpected effort high" in refused.text) == (400, True), refused.text
