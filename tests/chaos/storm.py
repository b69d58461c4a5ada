"""Calls posted again and again, in any order, by many threads.

This imitates retries, proxies and several API processes. Plain HTTP is used, so that the very same bytes are sent
again.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from app import ids
from app.wire import tinker_pb2 as pb
from ops.bench import client_batches
from tests.chaos.observer import Stalled
from tests.contract.stack import API_KEY, BASE, Stack
from tests.models import VOCAB_SIZE

_PATIENCE_S = 600.0
_PAUSE_S = 0.05
_THREADS = 8
# Two batches and a step make three calls, and a wave holds ten of those: far more than an SDK sends at once.
_WAVE = 30
_ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
_JSON, _PROTOBUF = "application/json", "application/x-protobuf"


@dataclass(frozen=True, slots=True)
class Call:
    """Bytes of one call; `seq` counts from 1."""

    seq: int
    path: str
    body: bytes
    content_type: str


@dataclass
class Storm:
    """A storm of `calls` on a separate model, each posted `copies` times."""

    stack: Stack
    seed: int
    calls: int
    copies: int
    posted: int = 0
    faults: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _local: threading.local = field(default_factory=threading.local)

    def in_order(self) -> list[Any]:
        """Returns every result when each call is posted once."""
        model_id = self._model()
        return [_content(self._result(self._post(call))) for call in self._calls(model_id)]

    def shuffled(self, share: Callable[[], float]) -> list[Any]:
        """Returns the results from many copies, with waves spread over the time in which `share` goes from 0 to 1.

        A result that changes after it was read once is a fault.
        """
        rng = random.Random(self.seed)
        model_id = self._model()
        calls = self._calls(model_id)
        read: dict[int, bytes] = {}
        waves = [calls[at : at + _WAVE] for at in range(0, len(calls), _WAVE)]
        with ThreadPoolExecutor(_THREADS) as pool:
            for number, wave in enumerate(waves):
                while share() < number / len(waves):
                    time.sleep(_PAUSE_S)
                copies = wave * self.copies
                rng.shuffle(copies)
                for call, request_id in zip(copies, pool.map(self._post, copies), strict=True):
                    if request_id != ids.request_id(model_id, call.seq):
                        self.faults.append(f"seq {call.seq} was promised as {request_id}")
                if number:
                    read.update(self._results(model_id, waves[number - 1]))
        found = self._results(model_id, calls)
        self.faults += [f"the result of seq {seq} changed" for seq, body in read.items() if found[seq] != body]
        return [_content(body) for body in found.values()]

    def _model(self) -> str:
        session = self._ask("create_session", {"sdk_version": "0.38.0", "tags": []})["session_id"]
        lora = {"rank": 4, "seed": self.seed}
        asked = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": lora}
        self._result(self._ask("create_model", asked)["request_id"])
        return ids.model_id(session, 0)

    def _calls(self, model_id: str) -> list[Call]:
        return [self._step(model_id, seq) if seq % 3 == 0 else self._batch(model_id, seq) for seq in self._seqs()]

    def _seqs(self) -> range:
        return range(1, self.calls + 1)

    def _batch(self, model_id: str, seq: int) -> Call:
        tokens = np.random.default_rng(seq).integers(3, VOCAB_SIZE, size=(4, 16), dtype=np.int32)
        request = client_batches.request(tokens, model_id)
        request.seq_id = seq
        return Call(seq, "forward_backward", request.SerializeToString(deterministic=True), _PROTOBUF)

    def _step(self, model_id: str, seq: int) -> Call:
        body = {"model_id": model_id, "seq_id": seq, "adam_params": _ADAM}
        return Call(seq, "optim_step", json.dumps(body).encode(), _JSON)

    def _post(self, call: Call) -> str:
        with self._lock:
            self.posted += 1
        answer: dict[str, Any] = json.loads(self._exchange(call.path, call.body, call.content_type))
        return str(answer["request_id"])

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        return json.loads(self._exchange(path, json.dumps(body).encode(), _JSON))

    def _results(self, model_id: str, calls: list[Call]) -> dict[int, bytes]:
        """Results by seq."""
        return {call.seq: self._result(ids.request_id(model_id, call.seq)) for call in calls}

    def _result(self, request_id: str) -> bytes:
        body = json.dumps({"request_id": request_id, "allow_metadata_only": False}).encode()
        return self._exchange("retrieve_future", body, _JSON)

    def _exchange(self, path: str, body: bytes, content_type: str) -> bytes:
        """Posts until it gets a 200, and returns the body. It resends whatever a client would (no answer, 408, 5xx)."""
        deadline = time.monotonic() + _PATIENCE_S
        last = ""
        while time.monotonic() < deadline:
            try:
                status, answer = self._send(path, body, content_type)
            except (OSError, http.client.HTTPException) as error:
                last = type(error).__name__
                self._local.connection = None
            else:
                if status == 200:
                    return answer
                last = f"{status} {answer[:200]!r}"
                if status != 408 and status < 500:
                    raise AssertionError(f"{path}: {last}")
            time.sleep(_PAUSE_S)
        raise Stalled(f"{path}: not within {_PATIENCE_S:.0f} s; the last answer was {last}")

    def _send(self, path: str, body: bytes, content_type: str) -> tuple[int, bytes]:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            parts = urlsplit(self.stack.url)
            connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
            self._local.connection = connection
        connection.request("POST", f"/api/v1/{path}", body, {"X-API-Key": API_KEY, "Content-Type": content_type})
        answer = connection.getresponse()
        return answer.status, answer.read()


def _content(body: bytes) -> Any:
    """A result as numbers, so that it can be compared within a bound."""
    if body.startswith(b"{"):
        return json.loads(body)
    output = pb.ForwardBackwardOutput.FromString(body)
    fields = [(name, np.frombuffer(t.data, "<f4")) for row in output.loss_fn_outputs for name, t in row.fields.items()]
    return dict(output.metrics), fields
