"""A caller of Anthropic's paths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from werkzeug.test import TestResponse

from tests.unit.app.api.chat.standin import Standin
from tests.unit.app.conftest import BASE, KEY, Api

URL, EARLIER_URL = "/anthropic/api/v1", "/anthropic/v1"
ASK = [{"role": "user", "content": "hi"}]
TOOL = {"name": "weather", "description": "its forecast", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"town": "Ulm"}}</tool_call>'


@dataclass
class Anthropic:
    """One caller of Anthropic's paths."""

    api: Api
    standin: Standin
    key: str = KEY

    def post(self, path: str = "messages", **body: Any) -> TestResponse:
        asked = {"model": BASE, "messages": ASK, **({"max_tokens": 20} if path == "messages" else {}), **body}
        return self.api.client.post(f"{URL}/{path}", json=asked, headers=self.headers)

    def message(self, **body: Any) -> dict[str, Any]:
        answer = self.post(**body)
        assert answer.status_code == 200, answer.text
        return answer.json

    def events(self, **body: Any) -> list[dict[str, Any]]:
        with self.post(stream=True, **body) as answer:
            assert (answer.status_code, answer.mimetype) == (200, "text/event-stream")
            return read_events(answer.text)

    def prompt(self) -> str:
        """The text of the newest request's prompt."""
        tokens = self.standin.seen[-1].prompt.tolist()
        return self.standin.tokenizer.core.decode(tokens, skip_special_tokens=False)

    @property
    def headers(self) -> dict[str, str]:
        return {"X-API-Key": self.key, "anthropic-version": "2023-06-01"}


def read_events(text: str) -> list[dict[str, Any]]:
    """The data of a stream's events, each named as its type."""
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def assembled(events: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The message that a stream's events make, in the one order that Anthropic's clients take."""
    first, *parts, delta, last = events
    assert (first["type"], delta["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    message = {**first["message"], **delta["delta"], "usage": delta["usage"]}
    written: list[str] = []
    for part in parts:
        kind, index = part["type"].removeprefix("content_block_"), part["index"]
        if kind == "start":
            assert index == len(message["content"]) == len(written)
            message["content"].append(part["content_block"])
            written.append("")
        elif kind == "delta":
            assert index == len(written) - 1
            (_, kind), (_, text) = part["delta"].items()
            assert kind == ("text_delta" if message["content"][-1]["type"] == "text" else "input_json_delta")
            written[-1] += text
        else:
            block = message["content"][-1]
            more = {"text": written[-1]} if block["type"] == "text" else {"input": json.loads(written[-1])}
            assert not block[next(iter(more))], "it starts empty"
            message["content"][-1] = {**block, **more}
    assert [part["index"] for part in parts if part["type"] == "content_block_stop"] == list(range(len(written)))
    return message
