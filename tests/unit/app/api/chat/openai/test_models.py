"""Model names in OpenAI's calls, and the sessions that own these calls."""

from __future__ import annotations

import time
from dataclasses import replace
from urllib.parse import quote

import pytest
from werkzeug.test import TestResponse

from app import ids
from app.domain.records import Sampler, Session
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.client import connect
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords, load
from tests.unit.app.api.chat.openai.caller import OAI, OpenAi
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.conftest import BASE, OTHER_KEY
from workers.maintenance.adapters import EphemeralAdapters


def test_ones_own_checkpoint_is_a_model_and_anothers_looks_missing(openai: OpenAi):
    openai.standin.says("cd")
    path = save_checkpoint(openai.api, openai.api.model(), "sampler_weights", prefix="models/x")
    stranger = replace(openai, key=OTHER_KEY)
    for name in (path, f"{BASE};{path}"):
        assert openai.completion(model=name)["choices"][0]["text"] == "cd"
        foreign = stranger.post("completions", model=name, prompt="ab")
        assert (foreign.status_code, foreign.json["error"]["code"]) == (404, "model_not_found")
    no_path = f"{path}-b"
    missing = openai.post("completions", model=no_path, prompt="ab")
    assert missing.json["error"]["message"].replace(no_path, path) == foreign.json["error"]["message"]
    assert openai.models() == [BASE, path]
    assert stranger.models() == [BASE]
    prefixes = {load(Sampler, stored).prefix for _, stored in openai.api.services.records.list("samplers")}
    assert prefixes == {"models/x"}


def test_a_path_saved_anew_is_sampled_as_it_is_now(openai: OpenAi):
    openai.standin.says("cd")
    model = openai.api.model()
    for prefix in ("models/old", "models/new"):
        openai.completion(model=save_checkpoint(openai.api, model, "sampler_weights", prefix=prefix))
    stored = [load(Sampler, fields).prefix for _, fields in openai.api.services.records.list("samplers")]
    assert sorted(stored) == ["models/new", "models/old"]


def test_a_sampler_that_ended_unused_is_made_again_by_the_next_call(openai: OpenAi, state_url: str):
    openai.standin.says("cd")
    services = openai.api.services
    path = save_checkpoint(openai.api, openai.api.model(), "sampler_weights", prefix="models/x")
    openai.completion(model=path)
    [sampler_id] = services.records.ids("samplers", "")
    with connect(state_url) as client:
        unused = RedisLifecycle(client, EngineSettings(ephemeral_s=0.001))
        time.sleep(0.01)
        EphemeralAdapters(unused, services.records, services.objects, EngineSettings()).sweep()
        assert list(services.records.ids("samplers", "")) == []
        assert openai.completion(model=path)["choices"][0]["text"] == "cd"
        assert list(services.records.ids("samplers", "")) == [sampler_id]
        services.records.update("samplers", sampler_id, {"created": "0"})
        lifecycle = RedisLifecycle(client, EngineSettings())
        EphemeralAdapters(lifecycle, services.records, services.objects, EngineSettings()).sweep()
        assert list(services.records.ids("samplers", "")) == [sampler_id], "it was used just now"


def retrieved(openai: OpenAi, model: str) -> TestResponse:
    """GET /models/{id}, with the id as OpenAI's client writes it."""
    headers = {"Authorization": f"Bearer {openai.key}"}
    return openai.api.client.get(f"{OAI}/models/{quote(model, safe='')}", headers=headers)


def test_each_listed_model_is_retrieved_and_no_other(openai: OpenAi):
    path = save_checkpoint(openai.api, openai.api.model(), "sampler_weights", prefix="models/x")
    for model in (BASE, path):
        answer = retrieved(openai, model)
        assert answer.status_code == 200
        listed = openai.api.client.get(f"{OAI}/models", headers={"Authorization": f"Bearer {openai.key}"})
        assert answer.json in listed.json["data"]
        assert (answer.json["id"], answer.json["object"]) == (model, "model")
    stranger = replace(openai, key=OTHER_KEY)
    assert retrieved(stranger, BASE).status_code == 200
    for caller, model in ((openai, "gpt-4o"), (openai, f"{path}-b"), (stranger, path)):
        answer = retrieved(caller, model)
        assert (answer.status_code, answer.json["error"]["code"]) == (404, "model_not_found")
        assert model in answer.json["error"]["message"]
    openai.api.services.records.delete("workers", "sampler-0")
    assert retrieved(openai, BASE).status_code == 404


def test_to_retrieve_a_model_reads_no_list_of_checkpoints(openai: OpenAi, monkeypatch: pytest.MonkeyPatch):
    run = openai.api.model()
    path, trained = save_checkpoint(openai.api, run, "sampler_weights"), save_checkpoint(openai.api, run)
    monkeypatch.setattr(RedisRecords, "list_checkpoints", lambda *_: pytest.fail("the checkpoints were listed"))
    assert [retrieved(openai, model).status_code for model in (BASE, path, trained)] == [200, 200, 404]


def test_models_are_listed_without_reading_their_checkpoints_whole(openai: OpenAi, state_url: str):
    def whole_records() -> int:
        with connect(state_url) as client:
            client.config_resetstat()
            openai.models()
            return int(client.info("commandstats")["cmdstat_hgetall"]["calls"])

    before = whole_records()
    paths = [save_checkpoint(openai.api, openai.api.model(), "sampler_weights") for _ in range(3)]
    assert whole_records() == before
    assert openai.models() == [BASE, *sorted(paths)]


def test_all_calls_of_an_owner_are_in_one_session_that_they_keep_alive(openai: OpenAi):
    openai.standin.says("cd")
    for _ in range(2):
        openai.completion()
    replace(openai, key=OTHER_KEY).completion()
    owners = [load(Session, stored).owner for _, stored in openai.api.services.records.list("sessions")]
    assert len(set(owners)) == len(owners) == 2
    with connect(openai.api.services.settings.redis.url) as client:
        for owner in owners:
            assert client.zscore(keys.SESSIONS_HEARD, ids.openai_session_id(owner)) is not None


def test_an_unknown_model_is_named_with_those_there_are(openai: OpenAi):
    answer = openai.post("completions", model="gpt-4o", prompt="ab")
    assert (answer.status_code, answer.json["error"]["code"]) == (404, "model_not_found")
    assert BASE in answer.json["error"]["message"]


def test_a_model_is_listed_while_its_sampler_lives(openai: OpenAi):
    assert openai.models() == [BASE]
    openai.api.services.records.delete("workers", "sampler-0")
    assert openai.models() == []
