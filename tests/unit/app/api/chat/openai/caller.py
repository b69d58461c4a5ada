"""A caller of OpenAI's paths."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from werkzeug.test import TestResponse

from tests.unit.app.api.chat.standin import Standin
from tests.unit.app.conftest import BASE, KEY, Api

OAI = "/oai/api/v1"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@dataclass
class OpenAi:
    """One caller of OpenAI's paths."""

    api: Api
    standin: Standin
    key: str = KEY

    def post(self, path: str, **body: Any) -> TestResponse:
        headers = {"Authorization": f"Bearer {self.key}"}
        return self.api.client.post(f"{OAI}/{path}", json={"model": BASE, **body}, headers=headers)

    def completion(self, **body: Any) -> dict[str, Any]:
        answer = self.post("completions", **{"prompt": "ab", "max_tokens": 20, **body})
        assert answer.status_code == 200, answer.text
        return answer.json

    def chat(self, **body: Any) -> dict[str, Any]:
        answer = self.post("chat/completions", **{"messages": [{"role": "user", "content": "hi"}], **body})
        assert answer.status_code == 200, answer.text
        return answer.json

    def models(self) -> list[str]:
        answer = self.api.client.get(f"{OAI}/models", headers={"Authorization": f"Bearer {self.key}"})
        return [model["id"] for model in answer.json["data"]]


def whole(answer: TestResponse) -> str:
    """The complete text of a stream."""
    with answer:
        return answer.text


def events(answer: TestResponse) -> list[dict[str, Any]]:
    """Chunks of a stream that ended well."""
    assert answer.mimetype == "text/event-stream"
    *lines, last, empty = whole(answer).split("\n\n")
    assert (last, empty) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def streamed(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])
