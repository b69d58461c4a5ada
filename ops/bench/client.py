"""HTTP client without the SDK: one kept-alive connection, one call at a time."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit

from app import ids
from app.wire import tinker_pb2 as pb
from ops.bench.servers import API_KEY

_PATIENCE_S = 120.0
_JSON, _PROTOBUF = "application/json", "application/x-protobuf"


class Client:
    """HTTP client that raises on every answer but 200 and a poll's 408: a bench must not measure refusals."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=120)

    def close(self) -> None:
        self._connection.close()

    def admit_model(self, base: str, rank: int) -> tuple[str, str]:
        """Returns (model id, request id of its create_model)."""
        session = self.call("create_session", {"sdk_version": "0.38.0", "tags": []})["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": base, "lora_config": {"rank": rank}}
        return ids.model_id(session, 0), self.call("create_model", asked)["request_id"]

    def forward_backward(self, request: pb.ForwardBackwardRequest) -> str:
        """Returns the request id, as do the next ones."""
        return self.send(request.SerializeToString())

    def send(self, body: bytes) -> str:
        """Sends a forward_backward with a prepared body."""
        request_id: str = json.loads(self._post("forward_backward", body, _PROTOBUF))["request_id"]
        return request_id

    def optim_step(self, model_id: str, seq: int, adam: dict[str, float]) -> str:
        request_id: str = self.call("optim_step", {"model_id": model_id, "seq_id": seq, "adam_params": adam})[
            "request_id"
        ]
        return request_id

    def result(self, request_id: str) -> bytes:
        """Waits for a result. Raises TimeoutError after minutes: something is broken, and the log names it."""
        body = json.dumps({"request_id": request_id, "allow_metadata_only": False}).encode()
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            status, answer = self._exchange("retrieve_future", body, _JSON)
            if status == 200:
                return answer
            if status != 408:
                raise RuntimeError(f"retrieve_future: {status} {answer[:500]!r}")
        raise TimeoutError(f"no result for {request_id} in {_PATIENCE_S:.0f} s; see the trainer's log")

    def call(self, path: str, body: dict[str, Any]) -> Any:
        return json.loads(self._post(path, json.dumps(body).encode(), _JSON))

    def _post(self, path: str, body: bytes, content_type: str) -> bytes:
        status, answer = self._exchange(path, body, content_type)
        if status != 200:
            raise RuntimeError(f"{path}: {status} {answer[:500]!r}")
        return answer

    def _exchange(self, path: str, body: bytes, content_type: str) -> tuple[int, bytes]:
        headers = {"X-API-Key": API_KEY, "Content-Type": content_type}
        self._connection.request("POST", f"/api/v1/{path}", body, headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read()
