"""Refusals of OpenAI's paths, in OpenAI's error format."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import redis

from app.errors import NotReplicated
from app.settings import LimitSettings
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.types import Admission
from tests.unit.app.api.chat.openai.caller import OAI, TOOLS, OpenAi
from tests.unit.app.api.chat.standin import CONTEXT
from tests.unit.app.conftest import BASE

BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "best_of": ("completions", {"best_of": 5}, "best_of"),
    "suffix": ("completions", {"suffix": "x"}, "suffix"),
    "bias": ("completions", {"logit_bias": {"1": 5}}, "logit_bias"),
    "penalty": ("completions", {"presence_penalty": 0.5}, "presence_penalty"),
    "unknown": ("completions", {"top_kk": 5}, "top_kk"),
    "min_p": ("completions", {"min_p": 0.1}, "min_p"),
    "repetition": ("chat/completions", {"repetition_penalty": 1.1}, "repetition_penalty"),
    "top_k": ("completions", {"top_k": -2}, "top_k"),
    "a fraction of top_k": ("chat/completions", {"top_k": 0.5}, "top_k"),
    "a high top_k": ("completions", {"top_k": 2**40}, "top_k"),
    "hot": ("completions", {"temperature": 2.5}, "temperature"),
    "no tokens": ("completions", {"max_tokens": 0}, "max_tokens"),
    "too many logprobs": ("completions", {"logprobs": 21}, "logprobs"),
    "a bad prompt": ("completions", {"prompt": {"a": 1}}, "prompt"),
    "mixed prompts": ("completions", {"prompt": ["a", 1]}, "prompt"),
    "many prompts": ("completions", {"prompt": ["a"] * 257}, "257"),
    "no prompt": ("completions", {"prompt": []}, "prompt"),
    "a token beyond": ("completions", {"prompt": [4000]}, "4000"),
    "a huge token": ("completions", {"prompt": [2**40]}, "32-bit"),
    "a long prompt": ("completions", {"prompt": "a" * CONTEXT}, str(CONTEXT)),
    "a text for ever": ("completions", {"prompt": ["a", "a" * (16 * CONTEXT + 1)]}, "characters"),
    "a chat for ever": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "a" * (16 * CONTEXT)}]},
        "characters",
    ),
    "much to repeat": (
        "completions",
        {"prompt": ["a" * 400] * 10, "n": 128, "echo": True, "logprobs": 20},
        "echo with logprobs: 2688 at each of 4000 positions",
    ),
    "bad stop": ("completions", {"stop": [1]}, "stop"),
    "empty stop": ("completions", {"stop": [""]}, "empty"),
    "json": ("chat/completions", {"response_format": {"type": "json_object"}}, "JSON schema"),
    "a variable of ours": (
        "chat/completions",
        {"chat_template_kwargs": {"messages": "x"}},
        "'messages' is not",
    ),
    "no name": ("chat/completions", {"chat_template_kwargs": {"a b": 1}}, "'a b' is not a variable"),
    "a list": ("chat/completions", {"chat_template_kwargs": {"a": [1]}}, "a must be true, false"),
    "a large number": ("chat/completions", {"chat_template_kwargs": {"a": 10**9}}, "a must be true, false"),
    "a long text": ("chat/completions", {"chat_template_kwargs": {"a": "x" * 1001}}, "at most 1000 characters"),
    "many variables": ("chat/completions", {"chat_template_kwargs": {f"a{i}": 1 for i in range(21)}}, "at most 20"),
    **{
        f"the effort {effort!r}": (
            "chat/completions",
            {"reasoning_effort": effort},
            "xhigh, max or a number from 0 to 1",
        )
        for effort in ("heroic", "0.5", True, -0.1, 1.01, float("nan"), [0.5])
    },
    "required": ("chat/completions", {"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
    "an image": ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    "a part of another type": (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "x" * 41}]}]},
        f"messages.0.content.1 is of type '{'x' * 40}'; only text and image_url are supported",
    ),
    "a role": ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, "role"),
    "half a surrogate pair": ("completions", {"prompt": "\ud800"}, "surrogate"),
    "half of one in a chat": ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
    "no messages": ("chat/completions", {"messages": []}, "messages"),
    "many messages": (
        "chat/completions",
        {"messages": [{"role": "user", "content": ""}] * 4097},
        "4097 entries; at most",
    ),
    "many wrong messages": ("chat/completions", {"messages": [{"role": "king"}] * 4096}, "messages.0.role"),
    "many fields": ("completions", {f"x{i}": 1 for i in range(101)}, "103 fields; at most 100"),
    "many fields of a message": (
        "chat/completions",
        {"messages": [{"role": "user", **{f"x{i}": 1 for i in range(100)}}]},
        "101 fields; at most 100",
    ),
    "many tools": ("chat/completions", {"tools": TOOLS * 513}, "513 entries; at most 512"),
    "top without": ("chat/completions", {"top_logprobs": 2}, "logprobs"),
    "bad arguments": (
        "chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "arguments",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_done_is_a_400_by_name_and_nothing_is_enqueued(openai: OpenAi, case: str):
    path, change, named = BAD[case]
    given = {"prompt": "ab"} if path == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    answer = openai.post(path, **{**given, **change})
    assert answer.status_code == 400, answer.text
    assert answer.json["error"].keys() == {"message", "type", "param", "code"}
    assert named in answer.json["error"]["message"]
    assert openai.api.services.oplog.pending() == []
    assert list(openai.api.services.records.list("samplers")) == []


def test_a_wrong_key_is_refused_in_openais_words(openai: OpenAi):
    answer = replace(openai, key="tml-wrong").post("completions", prompt="ab")
    assert (answer.status_code, answer.json["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("error", [NotReplicated("no replica has it"), redis.TimeoutError("no answer")])
def test_a_call_of_which_an_admission_is_in_doubt_leaves_no_request_behind(
    openai: OpenAi, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    admit, admitted = RedisOpLog.admit_sample, list[Admission]()

    def in_doubt(oplog: RedisOpLog, *call: Any) -> Admission:
        admitted.append(admit(oplog, *call))
        if len(admitted) == 2:
            raise error
        return admitted[0]

    monkeypatch.setattr(RedisOpLog, "admit_sample", in_doubt)
    answer = openai.post("completions", prompt=["ab", "cd"])
    assert (answer.status_code, len(admitted)) == (503, 2), answer.text
    assert openai.api.services.oplog.pending() == []


def test_other_paths_keep_their_own_form_of_errors(openai: OpenAi):
    assert openai.api.post("asample", {}).json.keys() == {"detail", "error"}


def test_one_call_samples_no_more_than_the_settings_allow(openai: OpenAi, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(openai.api.services.openai, "_limits", LimitSettings(sampled_tokens=10))
    answer = openai.post("completions", prompt="ab", n=2, max_tokens=6)
    assert (answer.status_code, "at most 10" in answer.json["error"]["message"]) == (400, True), answer.json


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "responses"),
        ("GET", "responses/resp_1"),
        ("POST", "embeddings"),
        ("POST", "audio/speech"),
        ("GET", "files"),
        ("POST", "x" * 5000),
    ],
)
def test_calls_that_are_not_served_say_so_in_openais_form(openai: OpenAi, method: str, path: str):
    answer = openai.api.client.open(
        f"{OAI}/{path}", method=method, json={"model": BASE}, headers={"Authorization": f"Bearer {openai.key}"}
    )
    assert answer.status_code == 404
    assert answer.json == {
        "error": {
            "message": f"{method} {f'{OAI}/{path}'[:200]} is not served here; this server has /completions, "
            "/chat/completions and /models",
            "type": "invalid_request_error",
            "param": None,
            "code": "unknown_url",
        }
    }


@pytest.mark.usefixtures("spent_budget")
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_spent_budget_is_a_403_with_openais_code(openai: OpenAi, path: str, stream: bool):
    openai.standin.says("an answer")
    content = {"prompt": "ab"} if path == "completions" else {"messages": [{"role": "user", "content": "ab"}]}
    refused = openai.post(path, stream=stream, **content)
    assert (refused.status_code, refused.json["error"]["code"]) == (403, "insufficient_quota")
    assert "its monthly_budget is 0" in refused.json["error"]["message"]
    assert openai.api.services.oplog.pending() == []
