"""Anthropic's calls as the API's description shows them."""

from __future__ import annotations

from app.api.examples import BASE_MODEL
from tests.unit.app.api.chat.anthropic.caller import URL, Anthropic
from tests.unit.app.api.openapi_examples import EXAMPLES
from tests.unit.app.conftest import BASE


def test_an_example_is_taken_and_answered_in_the_form_that_it_shows(anthropic: Anthropic):
    anthropic.standin.says("Rome.")
    body, answers = EXAMPLES[f"{URL}/messages"]
    shown = answers["200"]
    answer = anthropic.message(**{**body, "model": BASE})
    assert answer.keys() == shown.keys()
    assert shown["model"] == body["model"] == BASE_MODEL
    assert {**answer, "id": "", "model": "", "usage": ""} == {**shown, "id": "", "model": "", "usage": ""}
    assert answer["usage"].keys() == shown["usage"].keys()
    assert answer["id"].split("_")[0] == shown["id"].split("_")[0]


def test_the_example_of_a_count_counts_the_example_of_a_message(anthropic: Anthropic):
    body, answers = EXAMPLES[f"{URL}/messages/count_tokens"]
    asked, answered = EXAMPLES[f"{URL}/messages"]
    assert body.items() <= asked.items()
    assert answers["200"] == {"input_tokens": answered["200"]["usage"]["input_tokens"]}
    assert anthropic.post("messages/count_tokens", **{**body, "model": BASE}).json.keys() == answers["200"].keys()
