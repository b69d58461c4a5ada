"""Dispatch at admission: one task per future, on the right queue. A broker that is down never blocks admission."""

from __future__ import annotations

import json
import threading
from typing import Any
from unittest import mock

import pytest
import redis

from app import create_app
from app.api.base import EXTENSION
from app.services import admission
from app.settings import Settings
from app.stores.redis import durability
from app.stores.redis.client import connect
from app.stores.redis.types import Admission, UnreplicatedAdmission
from tests.servers import free_port
from tests.unit.app.conftest import BASE, Api, batch


def messages(api: Api, queue: str) -> list[dict[str, Any]]:
    """Headers of the messages in a queue, oldest first."""
    with connect(api.services.settings.broker_url) as client:
        return [json.loads(raw)["headers"] for raw in reversed(client.lrange(queue, 0, -1))]


def test_one_named_task_a_future_without_its_payload(api: Api) -> None:
    model = api.model()
    for _ in range(2):
        api.forward_backward(batch(model, 1))
    dispatched = [m for m in messages(api, f"train.{BASE}@node") if m["id"] == f"{model}:1"]
    assert [(m["task"], m["argsrepr"], model in m["kwargsrepr"]) for m in dispatched] == [
        ("tinsmith.forward_backward", "()", True)
    ]


def test_a_dispatch_goes_to_the_shared_queue_until_a_node_owns_the_model(api: Api) -> None:
    model = api.model()
    assert [m["id"] for m in messages(api, f"train.{BASE}")] == [f"{model}:0"]
    api.post("optim_step", {"model_id": model, "seq_id": 1})
    assert [m["id"] for m in messages(api, f"train.{BASE}@node")] == [f"{model}:1"]
    assert len(messages(api, f"train.{BASE}")) == 1


def test_a_sample_goes_to_its_bases_queue(api: Api) -> None:
    prompt = {"chunks": [{"tokens": [1], "type": "encoded_text"}]}
    answer = api.post("asample", {"sampling_session_id": api.sampler(), "seq_id": 0, "prompt": prompt})
    assert [m["id"] for m in messages(api, f"sample.{BASE}")] == [answer.json["request_id"]]


def test_a_broker_that_is_away_never_blocks_admission(api: Api, settings: Settings) -> None:
    model = api.model()
    redis_settings = settings.redis.model_copy(update={"broker_url": f"redis://127.0.0.1:{free_port()}/1"})
    app = create_app(settings.model_copy(update={"redis": redis_settings}))
    offline = Api(app.test_client(), app.extensions[EXTENSION])
    assert offline.forward_backward(batch(model, 1)).status_code == 200
    assert [waiting.seq for waiting in api.services.oplog.pending()] == [1]


@pytest.fixture
def unreplicated(api: Api, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Api:
    """An API that waits for a replica, where there is none."""
    monkeypatch.setattr(durability, "_WAIT_MS", 1)
    engine = settings.engine.model_copy(update={"replicas": 1})
    app = create_app(settings.model_copy(update={"engine": engine}))
    return Api(app.test_client(), app.extensions[EXTENSION])


def test_a_call_without_a_replica_is_dispatched_once_although_its_answer_is_a_503(api: Api, unreplicated: Api) -> None:
    model = api.model()
    for _ in range(3):
        refused = unreplicated.forward_backward(batch(model, 1))
        assert (refused.status_code, refused.json["error"]) == (503, "NotReplicated")
    assert [m["id"] for m in messages(api, f"train.{BASE}@node")] == [f"{model}:1"]
    assert api.forward_backward(batch(model, 1)).status_code == 200
    assert len(messages(api, f"train.{BASE}@node")) == 1, "a repeat is not dispatched"


def test_a_sample_without_a_replica_is_dispatched_once_and_a_throttled_one_not(
    api: Api, unreplicated: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, prompt = api.sampler(), {"chunks": [{"tokens": [1], "type": "encoded_text"}]}

    def ask(seq: int) -> None:
        asked = {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt}
        assert unreplicated.post("asample", asked).status_code == 503

    ask(0)
    ask(0)
    assert [m["id"] for m in messages(api, f"sample.{BASE}")] == [f"{sampler}:0"]
    held = UnreplicatedAdmission("no replica", Admission(f"{sampler}:1", True, None, throttled=True))
    monkeypatch.setattr(unreplicated.services.oplog, "admit_sample", mock.Mock(side_effect=held))
    ask(1)
    assert len(messages(api, f"sample.{BASE}")) == 1


class Faltering:
    """A journal that is down at the first beat, and blocks the thread at the third."""

    def __init__(self) -> None:
        self.beats = 0
        self.third_beat = threading.Event()

    def take_calls(self, seconds: float) -> None:
        self.beats += 1
        if self.beats == 1:
            raise redis.ConnectionError("away")
        if self.beats == 3:
            self.third_beat.set()
            threading.Event().wait()


def test_heartbeats_go_on_for_ever_and_after_an_outage(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(admission, "_BEAT_S", 0.01)
    journal = Faltering()
    admission.beat_for_ever(journal)
    assert journal.third_beat.wait(60)
