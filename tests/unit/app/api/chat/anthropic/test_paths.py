"""The paths of Anthropic's calls: those of the hosted service, and the earlier ones of this server."""

from __future__ import annotations

from typing import Any

import pytest

from app.web import openapi
from tests.unit.app.api.chat.anthropic.caller import ASK, EARLIER_URL, URL, Anthropic
from tests.unit.app.conftest import BASE


def test_each_route_is_served_below_both_paths_and_described_once(anthropic: Anthropic):
    application = anthropic.api.client.application
    rules = [rule for rule in application.url_map.iter_rules() if rule.rule.startswith("/anthropic/")]
    hosted, earlier = (
        {(rule.rule.removeprefix(url), *rule.methods) for rule in rules if rule.rule.startswith(f"{url}/")}
        for url in (URL, EARLIER_URL)
    )
    assert len(hosted) == 4
    assert (hosted, len(rules)) == (earlier, 8)
    described = [path for path in openapi()["paths"] if path.startswith("/anthropic/")]
    assert len(described) == 4
    assert all(path.startswith(f"{URL}/") for path in described)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "messages/count_tokens", {"model": BASE, "messages": ASK}, 200),
        ("POST", "messages/count_tokens", {"model": BASE}, 400),
        ("POST", "messages/count_tokens", {"model": "no model", "messages": ASK}, 404),
        ("GET", "models", None, 200),
    ],
)
def test_both_paths_give_the_same_answer(
    anthropic: Anthropic, method: str, path: str, body: dict[str, Any] | None, status: int
):
    hosted, earlier = (
        anthropic.api.client.open(f"{url}/{path}", method=method, json=body, headers=anthropic.headers)
        for url in (URL, EARLIER_URL)
    )
    assert (hosted.status_code, earlier.status_code) == (status, status), hosted.text
    assert {**hosted.json, "request_id": ""} == {**earlier.json, "request_id": ""}


def test_a_message_is_answered_on_the_earlier_path_too(anthropic: Anthropic):
    anthropic.standin.says("hello")
    body = {"model": BASE, "messages": ASK, "max_tokens": 20}
    answer = anthropic.api.client.post(f"{EARLIER_URL}/messages", json=body, headers=anthropic.headers)
    assert (answer.status_code, answer.json["content"]) == (200, [{"type": "text", "text": "hello"}])
