"""The queue as its owner sees it, and nobody else; cancellation of one call, and of all calls of a session."""

from __future__ import annotations

from typing import Any

import pytest

from app.domain.records import Worker
from app.domain.results import Result
from app.stores.redis import keys
from app.stores.redis.client import connect
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import dump, load
from tests.unit.app.conftest import API, BASE, Api, batch

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}


@pytest.fixture(autouse=True)
def fresh_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_SNAPSHOT_AGE_S", "_STATE_SNAPSHOT_AGE_S"):
        monkeypatch.setattr(f"app.services.queue.{name}", 0.0)


def ask(api: Api, sampler: str, seq: int = 0) -> str:
    body = {"sampling_session_id": sampler, "seq_id": seq, "prompt": PROMPT, "sampling_params": {}}
    return api.post("asample", body).json["request_id"]


def queue(api: Api, **query: Any) -> dict[str, Any]:
    answer = api.client.get(f"{API}/queue", headers={"X-API-Key": api.key}, query_string=query)
    assert answer.status_code == 200, answer.json
    return answer.json


def leave(api: Api, request_id: str) -> Any:
    return api.client.delete(f"{API}/queue/{request_id}", headers={"X-API-Key": api.key})


def set_worker(api: Api, role: str, queue_name: str, **more: Any) -> None:
    stored = api.services.records.get(Worker.namespace, f"{role}-0")
    worker = Worker(role, BASE, load(Worker, stored).info, {}, "", 0.0, queue=queue_name, **more)
    api.services.records.put(Worker.namespace, f"{role}-0", dump(worker))


def test_an_empty_queue_is_empty(api: Api) -> None:
    assert queue(api) == {"calls": [], "cursor": {"offset": 0, "limit": 100, "total_count": 0}}


def test_each_call_says_what_it_is_where_it_stands_and_when_it_may_start(api: Api) -> None:
    set_worker(api, "trainer", f"train.{BASE}", pace_s=3.0)
    set_worker(api, "sampler", f"sample.{BASE}", pace_s=2.0, batch=1)
    model, sampler = api.model(), api.sampler()
    for seq in (1, 2):
        api.forward_backward(batch(model, seq))
    samples = [ask(api, sampler, seq) for seq in (0, 1)]
    calls = {call.pop("request_id"): call for call in queue(api)["calls"]}
    assert list(calls) == [f"{model}:1", f"{model}:2", *samples]
    assert all(0 <= call.pop("waited_s") < 60 for call in calls.values())
    assert calls[f"{model}:2"] == {
        "kind": "forward_backward",
        "model_id": model,
        "seq_id": 2,
        "state": "waiting",
        "position": 2,
        "estimated_start_s": 3.0,
        "reason": "1 call runs before it, for about 3 s",
    }
    assert calls[samples[1]] == {
        "kind": "sample",
        "sampling_session_id": sampler,
        "seq_id": 1,
        "state": "waiting",
        "position": 2,
        "estimated_start_s": 2.0,
        "reason": "1 call runs before it, for about 2 s",
    }


def test_what_runs_is_said_to_run_and_what_has_ended_is_gone(api: Api) -> None:
    model, sampler = api.model(), api.sampler()
    api.forward_backward(batch(model, 1))
    samples = [ask(api, sampler, seq) for seq in (0, 1)]
    oplog = api.services.oplog
    oplog.next(oplog.acquire(model, "node/test"), 1)
    oplog.claim_sample(samples[1], "s/1")
    assert [call["state"] for call in queue(api)["calls"]] == ["running", "waiting", "running"]
    api.commit(model, 1)
    oplog.finish_sample(samples[1], Result(b""))
    assert [call["request_id"] for call in queue(api)["calls"]] == [samples[0]]


def test_what_has_ended_since_the_last_snapshot_is_gone_too(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    model = api.model()
    for seq in (1, 2):
        api.forward_backward(batch(model, seq))
    assert len(queue(api)["calls"]) == 2
    monkeypatch.setattr("app.services.queue._SNAPSHOT_AGE_S", 60.0)
    seqs = api.services.queue._backlog.seqs([model])
    monkeypatch.setattr(api.services.queue._backlog, "seqs", lambda models: seqs)
    api.commit(model, 1)
    assert [call["seq_id"] for call in queue(api)["calls"]] == [2]


def test_without_a_worker_it_is_paused_and_says_for_want_of_which(api: Api) -> None:
    model = api.model()
    api.forward_backward(batch(model, 1))
    api.services.records.delete(Worker.namespace, "trainer-0")
    (call,) = queue(api)["calls"]
    assert (call["state"], call["reason"]) == ("paused_capacity", f"no trainer of {BASE} is running")


def test_behind_a_gap_it_says_which_seq_is_missing(api: Api) -> None:
    model = api.model()
    api.forward_backward(batch(model, 3))
    (call,) = queue(api)["calls"]
    assert (call["reason"], call["estimated_start_s"]) == (
        "seq 1 of its model has not arrived yet and must run first",
        None,
    )


def test_others_calls_are_counted_and_nothing_more(api: Api, stranger: Api) -> None:
    theirs = api.model()
    for seq in range(1, 9):
        api.forward_backward(batch(theirs, seq))
    ask(api, api.sampler())
    mine = stranger.model()
    stranger.forward_backward(batch(mine, 1))
    seen = queue(stranger)
    assert [call["request_id"] for call in seen["calls"]] == [f"{mine}:1"]
    assert seen["cursor"]["total_count"] == 1
    assert seen["calls"][0]["position"] == 2, "turns go round: their eight cost one turn"
    assert theirs.partition(":")[0] not in str(seen)


def test_it_comes_in_pages(api: Api) -> None:
    model = api.model()
    for seq in range(1, 6):
        api.forward_backward(batch(model, seq))
    page = queue(api, offset=3, limit=1)
    assert [call["seq_id"] for call in page["calls"]] == [4]
    assert page["cursor"] == {"offset": 3, "limit": 1, "total_count": 5}


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "offset=-1", "project=mine"])
def test_what_it_does_not_know_is_refused(api: Api, query: str) -> None:
    answer = api.get(f"queue?{query}")
    assert (answer.status_code, query.partition("=")[0] in answer.json["detail"]) == (422, True)


def test_2000_polls_and_pages_within_a_moment_are_one_snapshot(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.services.queue._STATE_SNAPSHOT_AGE_S", 60.0)
    monkeypatch.setattr("app.services.queue._SNAPSHOT_AGE_S", 60.0)
    looks: list[int] = []
    backlog = api.services.queue._backlog
    unfinished = backlog.unfinished
    monkeypatch.setattr(backlog, "unfinished", lambda most: looks.append(most) or unfinished(most))
    model = api.model()
    request_id = api.forward_backward(batch(model, 1)).json["request_id"]
    monkeypatch.setattr(api.services.queue._snapshots, "_taken_at", float("-inf"))
    future = api.services.oplog.future(request_id, {_project(api, model)})
    states = {api.services.queue_states.of(future).reason for _ in range(2000)}
    assert queue(api)["cursor"]["total_count"] == 1
    assert (states, len(looks)) == ({"it runs now, or starts next"}, 1)


def test_a_sample_is_called_off_and_its_place_is_free_at_once(api: Api) -> None:
    sampler = api.sampler()
    first, second = (ask(api, sampler, seq) for seq in (0, 1))
    assert leave(api, first).status_code == 200
    assert [call["request_id"] for call in queue(api)["calls"]] == [second]
    assert queue(api)["calls"][0]["position"] == 1
    result = api.post("retrieve_future", {"request_id": first}).json
    assert (result["category"], "cancelled" in result["error"]) == ("user", True)
    assert leave(api, first).status_code == 200, "again is fine"


def test_a_result_that_came_before_the_cancellation_stays_for_the_client_that_waits_for_it(api: Api) -> None:
    sampler = api.sampler()
    request = ask(api, sampler)
    api.services.oplog.finish_sample(request, Result(b"{}"))
    with connect(api.services.settings.redis.url) as client:
        kept_s = client.ttl(keys.future(request))
        assert leave(api, request).status_code == 200
        assert client.ttl(keys.future(request)) > kept_s - 60
    completed = api.post("retrieve_futures", {"target": {"sampling_session_id": sampler}}).json["completions"]
    assert [completion["request_id"] for completion in completed] == [request]


def test_a_call_that_trains_stays_in_its_order_and_says_how_all_of_them_end(api: Api) -> None:
    model = api.model()
    for seq in (1, 2):
        api.forward_backward(batch(model, seq))
    refused = leave(api, f"{model}:1")
    assert (refused.status_code, "DELETE /api/v1/training_runs/<run>" in refused.json["detail"]) == (400, True)
    assert [call["seq_id"] for call in queue(api)["calls"]] == [1, 2]
    assert api.client.delete(f"{API}/training_runs/{model}", headers={"X-API-Key": api.key}).status_code == 200
    assert queue(api)["calls"] == []
    assert api.post("retrieve_future", {"request_id": f"{model}:2"}).json["category"] == "user"


def test_closing_a_session_ends_its_samples_lets_training_drain_and_frees_its_models(api: Api) -> None:
    """Training calls were accepted, and a client that closes need not have awaited its last save."""
    session = api.session()
    models = [api.model(session, model_seq_id=i) for i in range(2)]
    for model in models:
        api.forward_backward(batch(model, 1))
    asked = {"session_id": session, "base_model": BASE}
    samplers = [
        api.post("create_sampling_session", {**asked, "sampling_session_seq_id": i}).json["sampling_session_id"]
        for i in range(2)
    ]
    samples = [ask(api, sampler, seq) for sampler in samplers for seq in range(3)]
    api.services.oplog.claim_sample(samples[0], "s/1")
    other = ask(api, api.sampler())
    with connect(api.services.settings.redis.url) as client:
        lifecycle = RedisLifecycle(client, api.services.settings.engine)
        assert api.post(f"sessions/{session}/finish", {"reason": {"type": "success"}}).status_code == 200
        assert [call["request_id"] for call in queue(api)["calls"]] == [*(f"{model}:1" for model in models), other]
        ended = [api.post("retrieve_future", {"request_id": sample}).json for sample in samples]
        assert {result["category"] for result in ended} == {"user"}
        assert lifecycle.unwanted(models) == set()
        for model in models:
            api.commit(model, 1)
            assert api.post("retrieve_future", {"request_id": f"{model}:1"}).status_code == 200
        assert lifecycle.unwanted(models) == set(models), "their worker lets go of them now"
    assert [call["request_id"] for call in queue(api)["calls"]] == [other]


def _project(api: Api, model: str) -> str:
    return api.services.records.get("models", model)["owner"].strip('"')
