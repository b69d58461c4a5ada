"""Calls of clients, recorded with all their bytes: replayed unchanged, or sent to another model."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import requests

from app.wire.tinker_pb2 import ForwardBackwardRequest
from tests.contract.stack import API_KEY

_PROTOBUF = "application/x-protobuf"
_JSON = "application/json"
# Statuses that answer a poll while there is no result yet.
_TRY_AGAIN = 408
_PATIENCE_S = 240


@dataclass(frozen=True, slots=True)
class Result:
    """Answer to a poll."""

    content_type: str
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a result in JSON."""
        found: dict[str, Any] = json.loads(self.body)
        return found


@dataclass(frozen=True, slots=True)
class Call:
    """An acknowledged request: its `answer` names the future. `result` is set once a client had it."""

    path: str
    content_type: str
    body: bytes
    answer: Mapping[str, Any]
    result: Result | None = None

    @property
    def kind(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def request_id(self) -> str:
        return str(self.answer["request_id"])

    @property
    def model_id(self) -> str:
        """Model id; empty if the call is not in a model's own sequence."""
        return self._protobuf().model_id if self._is_batch else str(self._fields().get("model_id", ""))

    @property
    def seq(self) -> int:
        return self._protobuf().seq_id if self._is_batch else int(self._fields().get("seq_id", 0))

    def to(self, model_id: str, seq: int, **changes: Any) -> Call:
        """The same call for another model, or under another seq; `changes` are of a JSON body's fields."""
        if self._is_batch:
            batch = self._protobuf()
            batch.model_id, batch.seq_id = model_id, seq
            return replace(self, body=batch.SerializeToString(), answer={}, result=None)
        return self.changed(model_id=model_id, seq_id=seq, **changes)

    def changed(self, **changes: Any) -> Call:
        return replace(self, body=json.dumps({**self._fields(), **changes}).encode(), answer={}, result=None)

    def dump(self) -> dict[str, Any]:
        """Form for JSON."""
        result = self.result and {"content_type": self.result.content_type, "body": _text(self.result.body)}
        return {
            "path": self.path,
            "content_type": self.content_type,
            "body": _text(self.body),
            "answer": self.answer,
            "result": result,
        }

    @classmethod
    def load(cls, dumped: Mapping[str, Any]) -> Call:
        result = dumped["result"] and Result(dumped["result"]["content_type"], _bytes(dumped["result"]["body"]))
        return cls(dumped["path"], dumped["content_type"], _bytes(dumped["body"]), dumped["answer"], result)

    @property
    def _is_batch(self) -> bool:
        return self.content_type == _PROTOBUF

    def _protobuf(self) -> ForwardBackwardRequest:
        return ForwardBackwardRequest.FromString(self.body)

    def _fields(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


def send(url: str, call: Call) -> dict[str, Any]:
    """Sends the call and returns the API's answer."""
    headers = {"Content-Type": call.content_type, "X-API-Key": API_KEY}
    response = requests.post(url + call.path, call.body, headers=headers, timeout=_PATIENCE_S)
    assert response.ok, f"{call.path}: {response.status_code} {response.text}"
    answer: dict[str, Any] = response.json()
    return answer


def result(url: str, request_id: str) -> Result:
    """Polls for the future's result as the SDK does."""
    headers = {"Accept": f"{_PROTOBUF}, {_JSON}", "X-API-Key": API_KEY}
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        assert time.monotonic() < deadline, f"{request_id} has no result after {_PATIENCE_S} s"
        response = requests.post(
            f"{url}/api/v1/retrieve_future", json={"request_id": request_id}, headers=headers, timeout=_PATIENCE_S
        )
        if response.status_code == _TRY_AGAIN:
            continue
        assert response.ok, f"{request_id}: {response.status_code} {response.text}"
        return Result(response.headers["Content-Type"], response.content)


def made(url: str, call: Call) -> Result:
    return result(url, send(url, call)["request_id"])


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
