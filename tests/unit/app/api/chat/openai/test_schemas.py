"""OpenAI's response_format."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.app.api.chat.openai.caller import TOOLS, OpenAi

SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
HI = [{"role": "user", "content": "hi"}]


def format_of(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


@pytest.mark.usefixtures("follows_schemas")
@pytest.mark.parametrize(
    ("asked", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        (format_of(SCHEMA, strict=True, description="of a town"), SCHEMA),
        (format_of(SCHEMA, strict=None), SCHEMA),
    ],
)
def test_the_sampler_gets_the_schema_that_is_asked_for(openai: OpenAi, asked: dict[str, Any], schema: Any):
    openai.standin.says("{}")
    openai.chat(response_format=asked)
    (request,) = openai.standin.seen
    assert (json.loads(request.json_schema) if request.json_schema else None) == schema


@pytest.mark.usefixtures("follows_schemas")
@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}}, "only with it"),
        ({"response_format": format_of({"type": "string", "pattern": "a"})}, "json_schema.schema: the keyword"),
        ({"response_format": format_of({"const": float("inf")})}, "no JSON"),
        ({"response_format": format_of(SCHEMA), "tools": TOOLS}, "no tool call"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_a_400_and_nothing_is_enqueued(
    openai: OpenAi, asked: dict[str, Any], named: str
):
    answer = openai.post("chat/completions", messages=HI, **asked)
    assert (answer.status_code, named in answer.json["error"]["message"]) == (400, True), answer.text
    assert openai.api.services.oplog.pending() == []


def test_another_sampler_is_named_with_the_one_that_can(openai: OpenAi):
    openai.standin.says("{}")
    answer = openai.post("chat/completions", messages=HI, response_format={"type": "json_object"})
    assert answer.status_code == 400
    assert 'sampler.backend "vllm", which can' in answer.json["error"]["message"]
    assert openai.api.services.oplog.pending() == []
