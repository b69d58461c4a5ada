"""Calls as the SDK makes them: the same call is repeated while there is no answer, or while the answer is temporary."""

from __future__ import annotations

import time
from typing import Any

import requests

from tests.api_server import BASE, KEY, ApiServer

_PATIENCE_S = 120
_PASSES = (408, 429, 500, 502, 503, 504)
TENSOR = {"data": [2, 3, 4], "dtype": "int64", "shape": [3]}


def post(api: ApiServer, path: str, body: dict[str, Any]) -> requests.Response:
    """Posts once."""
    return requests.post(f"{api.url}/api/v1/{path}", json=body, headers={"X-API-Key": KEY}, timeout=60)


def persist(api: ApiServer, path: str, body: dict[str, Any]) -> requests.Response:
    """Returns the first answer that is not temporary."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            answer = post(api, path, body)
            if answer.status_code not in _PASSES or time.monotonic() > deadline:
                return answer
        except requests.ConnectionError:
            assert time.monotonic() < deadline, "the API did not come back"
        time.sleep(0.1)


def new_session(api: ApiServer) -> str:
    return persist(api, "create_session", {"tags": []}).json()["session_id"]


def create_model(session: str, rank: int = 4) -> dict[str, Any]:
    return {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": rank}}


def forward_backward(model: str, seq: int, token: int = 1, loss_fn: str = "cross_entropy") -> dict[str, Any]:
    datum = {"model_input": {"chunks": [{"tokens": [token, 2, 3]}]}, "loss_fn_inputs": {"target_tokens": TENSOR}}
    return {"model_id": model, "seq_id": seq, "forward_backward_input": {"data": [datum], "loss_fn": loss_fn}}


def optim_step(model: str, seq: int, rate: float = 0.1) -> dict[str, Any]:
    return {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": rate, "eps": 1e-8}}


def create_sampler(session: str, **source: str) -> dict[str, Any]:
    return {"session_id": session, "sampling_session_seq_id": 0, **(source or {"base_model": BASE})}


def sample(session: str, seq: int, token: int = 1) -> dict[str, Any]:
    prompt = {"chunks": [{"tokens": [token], "type": "encoded_text"}]}
    return {"sampling_session_id": f"{session}:sample:0", "seq_id": seq, "prompt": prompt}
