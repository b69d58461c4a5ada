"""Refusals of Anthropic's paths, in Anthropic's error format."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.app.api.chat.anthropic.caller import ASK, TOOL, URL, Anthropic
from tests.unit.app.api.chat.standin import CAPACITY, CONTEXT, MAX_BODY_BYTES
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.conftest import BASE, OTHER_KEY


def talk(*blocks: Any, role: str = "user") -> dict[str, Any]:
    """A request whose turn at index 1 holds these blocks, and is not the last."""
    turns = [{"role": "system", "content": "s"}, {"role": role, "content": list(blocks)}]
    return {"messages": [*turns, {"role": "user" if role == "assistant" else "assistant", "content": "x"}]}


TEXT = {"type": "text", "text": "a"}
CALL = {"type": "tool_use", "id": "a", "name": "f"}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no max_tokens": ({"max_tokens": None}, "max_tokens"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "hot": ({"temperature": 2.5}, "temperature"),
    "no top": ({"top_k": 0}, "top_k"),
    "unknown": ({"top_kk": 5}, "top_kk"),
    "thinking of a kind": ({"thinking": {"type": "deep"}}, "thinking.type"),
    "hidden thinking": ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display"),
    "a format": ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "JSON schema"),
    "a bad format": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "date"}}}},
        "output_config.format.schema.type",
    ),
    "forgotten tools": (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management",
    ),
    "any tool": ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice.type: Must be 'auto' or 'none'"),
    "this tool": ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}, "tool_choice"),
    "a tool of the server": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    "a tool without a schema": ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
    "a strict tool": ({"tools": [{**TOOL, "strict": True}]}, "tools.0.strict"),
    "many tools": ({"tools": [TOOL] * 513}, "513 entries; at most 512"),
    "many stops": ({"stop_sequences": ["a"] * 65}, "65 entries; at most 64"),
    "an empty stop": ({"stop_sequences": [""]}, "stop_sequences.0"),
    "no messages": ({"messages": []}, "messages"),
    "many messages": ({"messages": ASK * 4097}, "4097 entries; at most"),
    "a role": ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    "an image": (
        talk({"type": "text", "text": "a"}, {"type": "image", "source": {"type": "url"}}),
        "messages.1.content.1.source is of type 'url'",
    ),
    "an image of the assistant": (talk({"type": "image"}, role="assistant"), "'image'; only text"),
    "a document": (talk({"type": "document"}), "'document'; only text"),
    "thoughts of the user": (talk({"type": "thinking", "thinking": "hm"}), "'thinking'; only text"),
    "no thoughts": (talk({"type": "thinking"}, role="assistant"), "messages.1.content.0.thinking must be a string"),
    "a call of the user": (talk({"type": "tool_use"}), "'tool_use'; only text"),
    "a result of the assistant": (talk({"type": "tool_result"}, role="assistant"), "'tool_result'; only text"),
    "a call to go on after": (
        {"messages": [*ASK, {"role": "assistant", "content": [{"type": "tool_use"}]}]},
        "'tool_use'; only text",
    ),
    "a call without input": (
        talk({"type": "tool_use", "id": "a", "name": "f"}, role="assistant"),
        "content.0.input must",
    ),
    "a result of nothing": (talk({"type": "tool_result", "content": "x"}), "messages.1.content.0.tool_use_id must"),
    "an image as a result": (
        talk({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}),
        "messages.1.content.0.content.0.source must be an object",
    ),
    "a field of no block": (talk({**TEXT, "txt": "b"}), "messages.1.content.0.txt: a block of type text has no"),
    "a field of another block": (talk({**CALL, "input": {}, "text": "b"}, role="assistant"), "content.0.text: a block"),
    "an unknown field of a result": (
        talk({"type": "tool_result", "tool_use_id": "a", "content": [{**TEXT, "x": 1}]}),
        "messages.1.content.0.content.0.x",
    ),
    "a system with a field": ({"system": [{**TEXT, "x": 1}]}, "system.0.x"),
    "no text": (talk({"type": "text"}), "messages.1.content.0.text must be a string"),
    "no block": (talk(), "messages.1.content must be"),
    "a number": (talk(5), "'int'; only text"),
    "a system of images": ({"system": [{"type": "image"}]}, "system.0 is of type"),
    "a system by number": ({"system": 5}, "system must be"),
    "half a surrogate pair": ({"system": "\ud800"}, "surrogate"),
    "a long prompt": ({"system": "a" * CONTEXT}, str(CONTEXT - 1)),
    "a text for ever": ({"system": "a" * (16 * CONTEXT)}, "characters"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_done_is_a_400_by_name_and_nothing_is_enqueued(anthropic: Anthropic, case: str):
    change, named = BAD[case]
    answer = anthropic.post(**change)
    assert answer.status_code == 400, answer.text
    assert answer.json.keys() == {"type", "error", "request_id"}
    assert (answer.json["type"], answer.json["error"]["type"]) == ("error", "invalid_request_error")
    assert named in answer.json["error"]["message"]
    assert answer.headers["request-id"] == answer.json["request_id"]
    assert anthropic.api.services.oplog.pending() == []
    assert list(anthropic.api.services.records.list("samplers")) == []


def test_a_wrong_key_and_a_missing_model_have_their_types(anthropic: Anthropic):
    stranger = replace(anthropic, key=OTHER_KEY)
    path = save_checkpoint(anthropic.api, anthropic.api.model(), "sampler_weights")
    for path_of_call in ("messages", "messages/count_tokens"):
        refused = replace(anthropic, key="tml-wrong").post(path_of_call)
        assert (refused.status_code, refused.json["error"]["type"]) == (401, "authentication_error")
        for caller, model in ((anthropic, "claude-opus-4"), (stranger, path)):
            missing = caller.post(path_of_call, model=model)
            assert (missing.status_code, missing.json["error"]["type"]) == (404, "not_found_error")


def test_a_body_that_is_too_large_has_its_type(anthropic: Anthropic):
    answer = anthropic.post(system="a" * MAX_BODY_BYTES)
    assert (answer.status_code, answer.json["error"]["type"]) == (413, "request_too_large")


@pytest.mark.usefixtures("spent_budget")
@pytest.mark.parametrize("stream", [False, True])
def test_a_spent_budget_is_a_403(anthropic: Anthropic, stream: bool):
    anthropic.standin.says("an answer")
    refused = anthropic.post(stream=stream)
    assert (refused.status_code, refused.json["error"]["type"]) == (403, "permission_error")
    assert "its monthly_budget is 0" in refused.json["error"]["message"]


def test_calls_that_wait_are_bounded(anthropic: Anthropic):
    answers = [anthropic.post(stream=True) for _ in range(CAPACITY)]
    refused = anthropic.post(stream=True)
    assert (refused.status_code, refused.json["error"]["type"]) == (429, "rate_limit_error")
    assert "Retry-After" in refused.headers
    for answer in answers:
        answer.close()


@pytest.mark.parametrize(("method", "path"), [("POST", "messages/batches"), ("POST", "complete"), ("GET", "files")])
def test_calls_that_are_not_served_say_so_in_anthropics_form(anthropic: Anthropic, method: str, path: str):
    answer = anthropic.api.client.open(f"{URL}/{path}", method=method, json={"model": BASE}, headers=anthropic.headers)
    assert (answer.status_code, answer.json["error"]["type"]) == (404, "not_found_error")
    assert answer.json["error"]["message"] == (
        f"{method} {URL}/{path} is not served here; this server has /v1/messages, /v1/messages/count_tokens and "
        "/v1/models"
    )
