"""Anthropic's messages, their tools, and the tokens that are counted without an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic import types

from app.domain.limits import Limits
from app.domain.sampling import SampleOutput, SampleRequest
from app.errors import Unavailable
from tests.logs import everything_logged
from tests.unit.app.api.chat.anthropic.caller import ASK, CALL, TOOL, URL, Anthropic
from tests.unit.app.conftest import BASE, KEY

ASSISTANT = "<|im_start|>assistant\n"


def test_a_message_is_answered_by_the_models_template(anthropic: Anthropic):
    anthropic.standin.says("hello")
    answer = anthropic.message(system="be short")
    assert anthropic.prompt() == f"<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n{ASSISTANT}"
    usage = {
        "input_tokens": len(anthropic.standin.seen[0].prompt),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": len("hello") + 1,
    }
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": BASE,
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": usage,
    }


def test_parameters_of_sampling_reach_the_sampler(anthropic: Anthropic):
    anthropic.standin.says("hello")
    asked = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": 3, "stop_sequences": ["x", "y"]}
    anthropic.message(**asked)
    anthropic.message(**dict.fromkeys(asked))
    given, left_out = anthropic.standin.seen
    assert (given.temperature, given.top_p, given.top_k, given.seed) == (0.5, 0.25, 7, 3)
    assert (given.stop_strings, given.max_tokens, given.num_samples, given.stream) == (("x", "y"), 20, 1, False)
    assert (left_out.temperature, left_out.top_p, left_out.top_k, left_out.stop_strings) == (1.0, 1.0, -1, ())


def test_what_claude_code_sends_beside_the_conversation_changes_no_prompt(anthropic: Anthropic):
    anthropic.standin.says("hello")
    beside = {
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "{}"},
    }
    anthropic.message(thinking={"type": "adaptive"})
    anthropic.message(**beside)
    without, with_all = anthropic.standin.seen
    assert with_all.prompt.tolist() == without.prompt.tolist()


@pytest.mark.parametrize(
    ("said", "stopped", "reason", "sequence", "shown"),
    [
        ("one two", True, "end_turn", None, "one two"),
        ("one two", False, "max_tokens", None, "one two"),
        ("one END", False, "stop_sequence", "END", "one "),
    ],
)
def test_an_answer_says_why_it_ends(
    anthropic: Anthropic, said: str, stopped: bool, reason: str, sequence: str | None, shown: str
):
    anthropic.standin.says(said, stopped=stopped)
    answer = anthropic.message(stop_sequences=["never", "END"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    assert answer["content"] == [{"type": "text", "text": shown}]


def test_a_tools_call_is_a_block(anthropic: Anthropic):
    anthropic.standin.says(f"Let me see.{CALL}")
    answer = anthropic.message(tools=[TOOL])
    text, call = answer["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert call.pop("id").startswith("toolu_")
    assert call == {"type": "tool_use", "name": "weather", "input": {"town": "Ulm"}}
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    assert '"description": "its forecast", "parameters": {"type": "object"}' in anthropic.prompt()


def test_calls_alone_have_no_text_before_them(anthropic: Anthropic):
    anthropic.standin.says(f"\n{CALL}{CALL}")
    blocks = anthropic.message(tools=[TOOL])["content"]
    assert [block["type"] for block in blocks] == ["tool_use", "tool_use"]
    assert blocks[0]["id"] != blocks[1]["id"]


@pytest.mark.parametrize(("disabled", "count"), [(True, 1), (False, 2)])
def test_one_call_alone_may_be_asked_for(anthropic: Anthropic, disabled: bool, count: int):
    anthropic.standin.says(CALL * 2)
    choice = {"type": "auto", "disable_parallel_tool_use": disabled}
    assert len(anthropic.message(tools=[TOOL], tool_choice=choice)["content"]) == count


def test_with_the_choice_none_no_tool_is_offered_and_a_call_is_text(anthropic: Anthropic):
    anthropic.standin.says(CALL)
    answer = anthropic.message(tools=[TOOL], tool_choice={"type": "none"})
    assert (answer["content"], answer["stop_reason"]) == ([{"type": "text", "text": CALL}], "end_turn")
    assert "weather" not in anthropic.prompt()


def test_an_answer_goes_on_after_the_assistants_last_turn(anthropic: Anthropic):
    anthropic.standin.says("1}")
    answer = anthropic.message(messages=[*ASK, {"role": "assistant", "content": '{"x": '}])
    assert anthropic.prompt() == f'<|im_start|>user\nhi<|im_end|>\n{ASSISTANT}{{"x": '
    assert answer["content"][0]["text"] == "1}"


USED = {"type": "tool_use", "id": "a", "name": "weather", "input": {"town": "Ulm"}}
TALK: dict[str, Any] = {
    "system": "be short",
    "tools": [TOOL],
    "messages": [
        *ASK,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "a", "name": "weather", "input": {"town": "Ulm"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "sun"}]},
    ],
}


def test_a_talk_with_calls_and_results_is_the_templates(anthropic: Anthropic):
    anthropic.standin.says("sun")
    anthropic.message(**TALK)
    _, talk = anthropic.prompt().split("be short<|im_end|>\n")
    assert talk == (
        f"<|im_start|>user\nhi<|im_end|>\n{ASSISTANT}{CALL}<|im_end|>\n<|im_start|>tool\nsun<|im_end|>\n{ASSISTANT}"
    )


@pytest.mark.parametrize("asked", [{}, TALK, {"thinking": {"type": "disabled"}, "tool_choice": {"type": "none"}}])
def test_tokens_are_counted_as_an_answers_usage_counts_them(anthropic: Anthropic, asked: dict[str, Any]):
    anthropic.standin.says("hello")
    counted = anthropic.post("messages/count_tokens", **asked)
    assert counted.status_code == 200, counted.text
    assert anthropic.standin.seen == [], "nothing is sampled"
    assert counted.json == {"input_tokens": anthropic.message(**asked)["usage"]["input_tokens"]}


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_the_prompt_that_the_engine_had_kept_are_counted_apart(anthropic: Anthropic, stream: bool):
    anthropic.standin.answer = lambda *_: SampleOutput((anthropic.standin.sequence("hello"),), cached_tokens=5)
    usage = (anthropic.events()[-2] if stream else anthropic.message())["usage"]
    (request,) = anthropic.standin.seen
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (5, 0)
    assert usage["input_tokens"] == len(request.prompt) - 5
    assert types.MessageDeltaUsage.model_validate(usage).to_dict() == usage, "the client knows each field"


@pytest.mark.parametrize("headers", [{"X-API-Key": KEY}, {"Authorization": f"Bearer {KEY}"}])
def test_both_headers_of_anthropics_clients_hold_a_key(anthropic: Anthropic, headers: dict[str, str]):
    body = {"model": BASE, "messages": ASK}
    answer = anthropic.api.client.post(f"{URL}/messages/count_tokens?beta=true", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


def test_a_failure_of_the_server_is_found_in_its_log_by_the_answers_id(
    anthropic: Anthropic, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(anthropic.api.services.openai, "count", None)
    with everything_logged() as stream:
        answer = anthropic.post("messages/count_tokens")
    assert (answer.status_code, answer.json["error"]["type"]) == (500, "api_error")
    assert answer.json["request_id"] in stream.getvalue()


def test_an_outage_passes_and_is_named_so(anthropic: Anthropic, monkeypatch: pytest.MonkeyPatch):
    def away(*_: Any) -> SampleRequest:
        raise Unavailable("away")

    monkeypatch.setattr(anthropic.api.services.openai, "count", away)
    answer = anthropic.post("messages/count_tokens")
    assert (answer.status_code, answer.json["error"]["type"]) == (503, "overloaded_error")
    assert "Retry-After" in answer.headers


@pytest.mark.usefixtures("follows_schemas")
def test_the_sampler_gets_the_schema_of_the_output(anthropic: Anthropic):
    anthropic.standin.says("{}")
    schema = {"type": "object", "properties": {"town": {"type": "string"}}}
    asked = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    anthropic.message(**asked)
    assert json.loads(anthropic.standin.seen[0].json_schema) == schema
    begun = [*ASK, {"role": "assistant", "content": "{"}]
    for more in ({"messages": begun}, {"tools": [TOOL]}):
        refused = anthropic.post(**asked, **more)
        assert (refused.status_code, "continues no text" in refused.json["error"]["message"]) == (400, True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_has_its_token_ids_and_logprobs_where_they_are_asked_for(anthropic: Anthropic, stream: bool):
    anthropic.standin.says(f"é{CALL}")
    asked = {"tools": [TOOL], "return_token_ids": True, "max_tokens": 200}
    answer = anthropic.events(**asked)[-2] if stream else anthropic.message(**asked)
    (request,) = anthropic.standin.seen
    sampled = anthropic.standin.sequence(f"é{CALL}")
    assert answer["prompt_token_ids"] == request.prompt.tolist()
    assert answer["token_ids"] == sampled.tokens.tolist()
    assert answer["logprobs"] == pytest.approx(sampled.logprobs.tolist())
    assert "token_ids" not in anthropic.message()


def test_a_count_is_charged_as_a_call(anthropic: Anthropic, monkeypatch: pytest.MonkeyPatch):
    limits = anthropic.api.services.quotas._limits
    monkeypatch.setattr(limits, "_default", Limits(requests_per_s=0.0001))
    limits._found.clear()
    first, second = (anthropic.post("messages/count_tokens") for _ in range(2))
    limits._found.clear()
    assert (first.status_code, second.status_code) == (200, 429)
    assert "requests_per_s" in second.json["error"]["message"]
