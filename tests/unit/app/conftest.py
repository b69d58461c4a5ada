"""The API through Flask's test client, on a real Valkey and a real folder store. The tests stand in for the workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pytest
from flask import Flask
from flask.testing import FlaskClient
from tinker.proto import tinker_public_pb2 as sdk
from werkzeug.test import TestResponse

from app import create_app
from app.api.base import EXTENSION
from app.domain import adapters
from app.domain.records import BaseModelInfo, Worker
from app.domain.results import Result
from app.services import base_models
from app.services.container import Services
from app.settings import ApiSettings, BaseModelSettings, RedisSettings, Settings, hash_key
from app.stores.redis.client import connect
from app.stores.redis.records import dump
from app.stores.redis.types import OwnedElsewhere, Record
from tests.servers import start_valkey

KEY, OTHER_KEY, OPERATOR_KEY = "tml-one", "tml-two", "tml-operator"
BASE = "org/tiny"
VOCAB, CONTEXT = 300, 64
SHAPES: adapters.Shapes = {
    "attn": {f"model.layers.{i}.self_attn.{name}": (8, 6, 1) for i in range(2) for name in ("q_proj", "o_proj")},
    "mlp": {f"model.layers.{i}.mlp.up_proj": (8, 12, 1) for i in range(2)},
    "unembed": {},
}
API = "/api/v1"


@dataclass
class Api:
    """One caller, with the work of a worker for it."""

    client: FlaskClient
    services: Services
    key: str = KEY

    def post(self, path: str, body: Any = None, **options: Any) -> TestResponse:
        if body is not None:
            options["json"] = body
        return self.client.post(f"{API}/{path}", headers={"X-API-Key": self.key}, **options)

    def get(self, path: str) -> TestResponse:
        return self.client.get(f"{API}/{path}", headers={"X-API-Key": self.key})

    def forward_backward(self, message: sdk.ForwardBackwardRequest) -> TestResponse:
        return self.post("forward_backward", data=message.SerializeToString(), content_type="application/x-protobuf")

    def session(self) -> str:
        return self.post("create_session", {}).json["session_id"]

    def model(self, session_id: str | None = None, **body: Any) -> str:
        """Creates a model that is ready."""
        session_id = session_id or self.session()
        asked = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE, **body}
        answer = self.post("create_model", asked)
        assert answer.status_code == 200, answer.json
        self.commit(answer.json["model_id"], 0)
        return answer.json["model_id"]

    def sampler(self) -> str:
        asked = {"session_id": self.session(), "sampling_session_seq_id": 0, "base_model": BASE}
        return self.post("create_sampling_session", asked).json["sampling_session_id"]

    def commit(
        self, model_id: str, seq: int, result: Result | None = None, writes: list[tuple[str, str, Record]] | None = None
    ) -> None:
        lease = self.services.oplog.acquire(model_id, "node/test")
        assert not isinstance(lease, OwnedElsewhere)
        self.services.oplog.commit(lease, seq, result or Result(b"{}"), writes or [])

    def ops(self, model_id: str) -> list[int]:
        """Seqs in the journal."""
        return [seq for seq in range(20) if self.services.oplog.entry(model_id, seq) is not None]


@pytest.fixture(scope="session")
def state_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_valkey(tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture(scope="session")
def settings(state_url: str, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(
        data_dir=tmp_path_factory.mktemp("data"),
        api_keys=(hash_key(KEY), hash_key(OTHER_KEY), hash_key(OPERATOR_KEY)),
        operator_keys=(hash_key(OPERATOR_KEY),),
        url_secret="s" * 32,
        capture_secret="c" * 32,
        api=ApiSettings(poll_hold_s=0.3, max_body_bytes=2**20),
        redis=RedisSettings(url=state_url),
        base_models=(BaseModelSettings(name=BASE, path="org/tiny-weights"),),
    )


@pytest.fixture(scope="session")
def app(settings: Settings) -> Flask:
    """One application for all tests, because each application starts a thread that listens for results."""
    return create_app(settings)


@pytest.fixture
def api(app: Flask, state_url: str) -> Api:
    with connect(state_url) as client:
        client.flushall()
    services: Services = app.extensions[EXTENSION]
    for role in ("trainer", "sampler"):
        add_worker(services, role)
    return Api(app.test_client(), services)


@pytest.fixture
def stranger(api: Api) -> Api:
    return Api(api.client, api.services, OTHER_KEY)


def add_worker(services: Services, role: str, context: int = CONTEXT, **facts: bool) -> None:
    info = BaseModelInfo(BASE, "Qwen3ForCausalLM", VOCAB, context, "float32", ("attn", "mlp"))
    described = {base_models.SHAPES: adapters.rows(SHAPES)} if role == "trainer" else facts
    services.records.put(
        Worker.namespace,
        f"{role}-0",
        dump(Worker(role, BASE, json.loads(json.dumps(asdict(info))), described, "", 0.0)),
    )


def batch(
    model_id: str,
    seq: int,
    *,
    tokens: list[int] | None = None,
    loss_fn: str = "cross_entropy",
    config: dict[str, float] | None = None,
    **inputs: Any,
) -> sdk.ForwardBackwardRequest:
    """A one-datum request as the SDK's own message; inputs default to target_tokens alone."""
    tokens = [1, 2, 3] if tokens is None else tokens
    message = sdk.ForwardBackwardRequest(model_id=model_id, seq_id=seq, loss_fn=loss_fn)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
    for name, values in (inputs or {"target_tokens": [2, 3, 4]}).items():
        set_tensor(datum.loss_fn_inputs[name], name, np.asarray(values))
    for key, value in (config or {}).items():
        message.loss_fn_config_v2[key].number = value
    return message


def set_tensor(tensor: sdk.Tensor, name: str, values: np.ndarray) -> None:
    is_targets = name == "target_tokens"
    tensor.dtype = sdk.DTYPE_INT64 if is_targets else sdk.DTYPE_FLOAT32
    tensor.dense = values.astype("<i8" if is_targets else "<f4").tobytes()
    tensor.shape.extend(values.shape)
