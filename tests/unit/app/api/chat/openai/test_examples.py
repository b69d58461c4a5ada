"""OpenAI's calls as the API's description shows them."""

from __future__ import annotations

from typing import Any

import pytest

from app.api.examples import BASE_MODEL
from tests.unit.app.api.chat.openai.caller import OAI, OpenAi
from tests.unit.app.api.openapi_examples import EXAMPLES
from tests.unit.app.conftest import BASE


def form(value: Any) -> Any:
    """The types of a body's values, with its texts where they say of which kind something is."""
    if isinstance(value, dict):
        return {key: each if key in ("object", "role", "finish_reason") else form(each) for key, each in value.items()}
    return [form(each) for each in value] if isinstance(value, list) else type(value)


@pytest.mark.parametrize(("path", "said"), [("chat/completions", "Rome."), ("completions", " Rome.")])
def test_an_example_is_taken_and_answered_in_the_form_that_it_shows(openai: OpenAi, path: str, said: str) -> None:
    openai.standin.says(said)
    body, answers = EXAMPLES[f"{OAI}/{path}"]
    shown = answers["200"]
    answer = openai.post(path, **{**body, "model": BASE})
    assert answer.status_code == 200, answer.text
    assert body["model"] == shown["model"] == BASE_MODEL
    assert form(answer.json) == form(shown)
    assert answer.json["choices"] == shown["choices"]
    assert answer.json["id"].split("-")[0] == shown["id"].split("-")[0]
