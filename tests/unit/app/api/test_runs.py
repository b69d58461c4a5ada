"""A run is deleted by its owner, once and permanently."""

from __future__ import annotations

import json

import pytest

from app.dispatch import TICK
from app.domain.records import Sampler
from app.domain.results import Result
from app.stores.redis.client import connect
from app.stores.redis.records import dump
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.conftest import BASE, Api, batch


def delete(api: Api, model: str) -> tuple[int, bytes]:
    answer = api.client.delete(f"/api/v1/training_runs/{model}", headers={"X-API-Key": api.key})
    return answer.status_code, answer.data


def waiting_tasks(api: Api) -> list[str]:
    """Tasks on the queue of the worker that `Api.model` stands in for."""
    with connect(api.services.settings.broker_url) as client:
        return [json.loads(raw)["headers"]["task"] for raw in client.lrange(f"train.{BASE}@node", 0, -1)]


def test_a_deleted_run_takes_no_more_calls_and_says_what_to_do(api: Api) -> None:
    model = api.model()
    api.forward_backward(batch(model, 1))
    assert delete(api, model)[0] == 200
    poll = api.post("retrieve_future", {"request_id": f"{model}:1"})
    assert (poll.json["category"], "create a new model" in poll.json["error"]) == ("user", True)
    later = [
        api.forward_backward(batch(model, 2)),
        api.post("optim_step", {"model_id": model, "seq_id": 3, "adam_params": {}}),
        api.post("save_weights", {"model_id": model, "seq_id": 4, "path": "a"}),
    ]
    assert [answer.status_code for answer in later] == [410] * 3
    assert all("create a new model" in answer.json["detail"] for answer in later)
    assert api.ops(model) == []


def test_deleting_a_run_again_is_fine(api: Api) -> None:
    model = api.model()
    assert [delete(api, model)[0] for _ in range(2)] == [200, 200]


def test_a_deleted_run_keeps_its_checkpoints_listed_and_loadable(api: Api) -> None:
    model = api.model()
    path = save_checkpoint(api, model)
    delete(api, model)
    listed = api.get(f"training_runs/{model}/checkpoints").json["checkpoints"]
    assert [found["tinker_path"] for found in listed] == [path]
    assert api.get(f"training_runs/{model}").json["last_checkpoint"]["tinker_path"] == path
    body = {"session_id": api.session(), "model_seq_id": 0, "path": path, "optimizer": True, "user_metadata": {}}
    assert api.post("load_weights", body).status_code == 200


def test_another_ones_run_can_not_be_deleted_and_looks_missing(api: Api, stranger: Api) -> None:
    model = api.model()
    foreign = delete(stranger, model)
    assert api.forward_backward(batch(model, 1)).status_code == 200
    api.services.records.delete("models", model)
    assert foreign == delete(api, model)
    assert foreign[0] == 404


def test_the_same_model_can_not_be_created_again_but_the_next_one_can(api: Api) -> None:
    session = api.session()
    model = api.model(session)
    delete(api, model)
    body = {"session_id": session, "base_model": "org/tiny"}
    again = api.post("create_model", {**body, "model_seq_id": 0, "lora_config": {"rank": 2}})
    assert again.status_code == 400, "its seq 0 was used with other content"
    assert api.post("create_model", {**body, "model_seq_id": 1}).status_code == 200


def test_its_ephemeral_sampler_is_gone_with_it(api: Api) -> None:
    session = api.session()
    model = api.model(session)
    prefix = f"models/{model}/sampler_weights/ephemeral-1/1-1"
    sampler = f"{session}:sample:0"
    api.services.records.put("samplers", sampler, dump(Sampler("x", session, "org/tiny", 0.0, prefix=prefix)))
    delete(api, model)
    assert api.services.records.get(Sampler.namespace, sampler) is None


@pytest.mark.parametrize("how", ["finish", "delete", "unload"])
def test_the_trainer_that_holds_a_model_is_woken_to_free_it(api: Api, how: str) -> None:
    session = api.session()
    model = api.model(session)
    assert waiting_tasks(api) == []
    if how == "delete":
        delete(api, model)
    elif how == "unload":
        api.post("unload_model", {"model_id": model})
    else:
        api.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    assert waiting_tasks(api) == [TICK]


@pytest.mark.parametrize("reason", ["success", "errored"])
def test_a_finished_session_still_takes_calls(api: Api, reason: str) -> None:
    session = api.session()
    model = api.model(session)
    api.post(f"sessions/{session}/finish", {"reason": {"type": reason}})
    assert api.forward_backward(batch(model, 1)).status_code == 200


def test_a_model_that_could_not_be_created_is_listed_as_corrupted(api: Api) -> None:
    session = api.session()
    asked = {"session_id": session, "model_seq_id": 0, "base_model": "org/tiny"}
    model = api.post("create_model", asked).json["model_id"]
    assert api.get(f"training_runs/{model}").json["corrupted"] is False
    api.commit(model, 0, Result(b'{"error": "no", "category": "user"}', failed=True))
    assert api.get(f"training_runs/{model}").json["corrupted"] is True


def test_a_deleted_run_says_so(api: Api) -> None:
    model = api.model()
    assert api.get(f"training_runs/{model}").json["ended"] is False
    delete(api, model)
    assert api.get(f"training_runs/{model}").json["ended"] is True


def test_very_many_checkpoints_of_others_are_not_read_for_a_listing(api: Api, state_url: str) -> None:
    model = api.model()
    save_checkpoint(api, model)
    with connect(state_url) as client:

        def reads() -> int:
            api.get(f"training_runs/{model}/checkpoints")
            before = client.info("commandstats")["cmdstat_hgetall"]["calls"]
            assert len(api.get(f"training_runs/{model}/checkpoints").json["checkpoints"]) == 1
            return client.info("commandstats")["cmdstat_hgetall"]["calls"] - before

        alone = reads()
        for _ in range(3):
            save_checkpoint(api, api.model())
        assert reads() == alone == 1


def test_very_many_runs_of_others_are_not_read_for_a_listing(api: Api, stranger: Api, state_url: str) -> None:
    model = api.model()
    with connect(state_url) as client:

        def commands() -> int:
            """The fewest of five tries: other threads send some too, and a connection that was idle asks for the
            server."""
            return min(listed() for _ in range(5))

        def listed() -> int:
            before = sum(said["calls"] for said in client.info("commandstats").values())
            assert [run["training_run_id"] for run in api.get("training_runs").json["training_runs"]] == [model]
            return sum(said["calls"] for said in client.info("commandstats").values()) - before

        alone = commands()
        session = stranger.session()
        for seq in range(100):
            stranger.post("create_model", {"session_id": session, "model_seq_id": seq, "base_model": BASE})
        assert commands() == alone
    own = stranger.get("training_runs?limit=100").json
    assert (len(own["training_runs"]), own["cursor"]["total_count"]) == (100, 100)
