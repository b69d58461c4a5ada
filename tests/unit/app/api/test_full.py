"""Full fine-tuning at the API: a model without an adapter, and Ops that wait for separate trainers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from flask import Flask

from app import create_app
from app.api.base import EXTENSION
from app.domain import ops
from app.domain.records import Sampler, Worker
from app.settings import SamplerSettings, Settings, TrainerSettings
from app.stores.redis.client import connect
from app.stores.redis.records import load
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.conftest import BASE, Api, add_worker

FULL: dict[str, Any] = {"lora_config": None}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}


@pytest.fixture(scope="module")
def app(settings: Settings) -> Flask:
    return create_app(offering(settings, full=TrainerSettings()))


def offering(settings: Settings, **sections: Any) -> Settings:
    base = settings.base_models[0].model_copy(update=sections)
    return settings.model_copy(update={"base_models": (base,)})


@pytest.fixture
def api(api: Api) -> Api:
    add_worker(api.services, "full_trainer")
    return api


@pytest.fixture(scope="module")
def sampling_app(settings: Settings) -> Flask:
    return create_app(offering(settings, full=TrainerSettings(), full_sampler=SamplerSettings(queue_requests=1)))


@pytest.fixture
def sampling(sampling_app: Flask, api: Api) -> Api:
    """An API that also has samplers of full fine-tunes."""
    services = sampling_app.extensions[EXTENSION]
    add_worker(services, "full_sampler")
    return Api(sampling_app.test_client(), services)


@pytest.mark.parametrize("asked", [FULL, {"lora_config": {"rank": 0}}])
def test_no_adapter_or_one_of_rank_0_is_a_full_model(api: Api, asked: dict[str, Any]) -> None:
    model = api.model(**asked)
    entry = api.services.oplog.entry(model, 0)
    assert entry is not None
    assert ops.decode(entry.payload) == ops.CreateModel(ops.ModelSpec(BASE, None))
    info = api.post("get_info", {"model_id": model}).json
    assert (info["is_lora"], "lora_rank" in info) == (False, False)
    run = api.get(f"training_runs/{model}").json
    assert (run["is_lora"], run.get("lora_rank")) == (False, None)


def test_a_critic_can_be_full_too(api: Api) -> None:
    model = api.model(**FULL, user_metadata={"model_role": "critic"})
    entry = api.services.oplog.entry(model, 0)
    assert entry is not None
    assert ops.decode(entry.payload) == ops.CreateModel(ops.ModelSpec(BASE, None, critic=True))


def test_without_a_word_of_it_a_model_is_an_adapter_of_rank_32(api: Api) -> None:
    assert api.post("get_info", {"model_id": api.model()}).json["is_lora"]


def test_its_ops_wait_for_trainers_of_their_own(api: Api, state_url: str) -> None:
    model = api.model(**FULL)
    api.post("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
    api.post("save_weights", {"model_id": model, "seq_id": 2, "path": "no/name"})
    assert [waiting.queue for waiting in api.services.oplog.pending()] == [f"full.{BASE}"]
    with connect(api.services.settings.broker_url) as broker:
        assert broker.llen(f"train.{BASE}") == 0


def test_readiness_waits_for_its_trainers_too(api: Api) -> None:
    assert api.services.bases.missing() == []
    api.services.records.delete(Worker.namespace, "full_trainer-0")
    assert api.services.bases.missing() == [f"full_trainer for {BASE}"]


def test_a_checkpoint_of_all_weights_makes_a_full_model(api: Api) -> None:
    path = save_checkpoint(api, api.model(), lora={})
    asked = {"session_id": api.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    model = api.post("load_weights", asked).json["model_id"]
    assert not api.post("get_info", {"model_id": model}).json["is_lora"]
    entry = api.services.oplog.entry(model, 0)
    assert entry is not None
    assert ops.decode(entry.payload).spec.lora is None


@pytest.mark.parametrize("full", [False, True])
def test_a_model_does_not_load_what_the_other_kind_saved(api: Api, full: bool) -> None:
    adapter = dataclasses.asdict(ops.LoraSpec(rank=4, seed=5))
    path = save_checkpoint(api, api.model(), lora=adapter if full else {})
    model = api.model(**(FULL if full else {}))
    answer = api.post("load_weights", {"model_id": model, "seq_id": 1, "path": path, "optimizer": False})
    assert answer.status_code == 400
    assert "LoRA adapter" in answer.json["detail"]
    assert "create a new model" in answer.json["detail"]


def test_what_this_server_can_not_sample_is_refused_with_a_way_out(api: Api) -> None:
    model = api.model(**FULL)
    session = api.session()
    path = save_checkpoint(api, model, "sampler_weights", lora={})
    answers = [
        api.post("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}),
        api.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}),
    ]
    for answer in answers:
        assert answer.status_code == 400
        assert "save_weights_external" in answer.json["detail"]
        assert "base_models.full_sampler" in answer.json["detail"]
    named = api.post("save_weights_for_sampler", {"model_id": model, "seq_id": 2, "path": "a"})
    assert named.status_code == 200


def test_what_samples_it_reads_a_queue_of_its_own(sampling: Api) -> None:
    """So no sampler of adapters ever has its weights, and its queue has its own bounds."""
    path = save_checkpoint(sampling, sampling.model(**FULL), "sampler_weights", lora={})
    asked = {"session_id": sampling.session(), "sampling_session_seq_id": 0, "model_path": path}
    sampler = sampling.post("create_sampling_session", asked).json["sampling_session_id"]
    call = {"sampling_session_id": sampler, "seq_id": 1, "prompt": PROMPT, "sampling_params": {}}
    assert sampling.post("asample", call).status_code == 200
    assert [waiting.queue for waiting in sampling.services.oplog.pending()] == [f"fullsample.{BASE}"]
    assert sampling.post("asample", {**call, "seq_id": 2}).status_code == 429
    asked = {"session_id": sampling.session(), "sampling_session_seq_id": 0, "base_model": BASE}
    of_base = sampling.post("create_sampling_session", asked).json["sampling_session_id"]
    assert sampling.post("asample", {**call, "sampling_session_id": of_base}).status_code == 200
    assert {waiting.queue for waiting in sampling.services.oplog.pending()} == {f"fullsample.{BASE}", f"sample.{BASE}"}
    stored = sampling.services.records.get(Sampler.namespace, sampler)
    assert stored is not None
    assert load(Sampler, stored).full


def test_new_weights_are_taken_for_sampling_without_a_name(sampling: Api) -> None:
    model = sampling.model(**FULL)
    asked = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
    assert sampling.post("save_weights_for_sampler", asked).status_code == 200


def test_readiness_waits_for_its_samplers_too(sampling: Api) -> None:
    assert sampling.services.bases.missing() == []
    sampling.services.records.delete(Worker.namespace, "full_sampler-0")
    assert sampling.services.bases.missing() == [f"full_sampler for {BASE}"]
