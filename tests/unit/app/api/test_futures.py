from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tinker.types.futures_retrieve_response import FuturesRetrieveResponse
from werkzeug.test import TestResponse

from app import create_app
from app.domain.ops import Ragged
from app.domain.records import Worker
from app.domain.results import PROTOBUF, ForwardBackwardOutput, Result
from app.settings import RedisSettings, Settings
from app.stores.redis import keys
from app.stores.redis.client import connect
from app.suspension import SUSPENSION, Suspension
from app.telemetry import REQUEST_SECONDS
from app.wire.results import encode_forward_backward
from tests.servers import free_port
from tests.unit.app.conftest import API, BASE, KEY, Api, add_worker, batch


def poll(api: Api, request_id: str) -> tuple[int, bytes, str]:
    answer = api.post("retrieve_future", {"request_id": request_id, "allow_metadata_only": True})
    return answer.status_code, answer.data, answer.content_type


def ask(api: Api, sampler: str, seq: int = 0) -> str:
    """Admits a sample and returns its request id."""
    prompt = {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]}
    return api.post("asample", {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt}).json["request_id"]


def poll_all(api: Api, sampler: str, **asked: Any) -> TestResponse:
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": asked.pop("clone", 0)}
    return api.post("retrieve_futures", {"target": target, "prev_cursor": 0, "retrieved_request_ids": [], **asked})


def test_a_finished_result_comes_back_unchanged_and_again(api: Api) -> None:
    model = api.model()
    api.forward_backward(batch(model, 1))
    api.commit(model, 1, Result(b"\x00\xff bytes", PROTOBUF))
    assert poll(api, f"{model}:1") == (200, b"\x00\xff bytes", PROTOBUF)
    assert poll(api, f"{model}:1") == (200, b"\x00\xff bytes", PROTOBUF)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("application/json", "application/json"),
        ("application/x-protobuf, application/json", PROTOBUF),
        ("application/x-protobuf", PROTOBUF),
        ("*/*", PROTOBUF),
        (None, PROTOBUF),
    ],
)
def test_a_client_that_would_rather_have_json_gets_the_same_result_as_json(
    api: Api, accept: str | None, content_type: str
) -> None:
    model = api.model()
    api.forward_backward(batch(model, 1))
    output = ForwardBackwardOutput(Ragged.of([np.array([-0.5, -1.0, -2.0])], np.float32), {"loss:sum": 3.5})
    stored = encode_forward_backward(output)
    api.commit(model, 1, Result(stored, PROTOBUF))
    headers = {"X-API-Key": KEY, **({"Accept": accept} if accept else {})}
    answer = api.client.post(f"{API}/retrieve_future", json={"request_id": f"{model}:1"}, headers=headers)
    assert answer.content_type == content_type
    if content_type == PROTOBUF:
        assert answer.data == stored
    else:
        assert answer.json["metrics"] == {"loss:sum": 3.5}
        assert answer.json["loss_fn_outputs"][0]["logprobs"]["data"] == [-0.5, -1.0, -2.0]


def test_a_failed_future_is_a_200_with_its_error(api: Api) -> None:
    model = api.model()
    api.forward_backward(batch(model, 1))
    body = b'{"error": "too much", "category": "user"}'
    api.commit(model, 1, Result(body, failed=True))
    assert poll(api, f"{model}:1") == (200, body, "application/json")


def test_a_poll_that_is_not_ready_says_try_again_and_what_runs_first(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.services.queue._STATE_SNAPSHOT_AGE_S", 0.0)
    model = api.model()
    api.forward_backward(batch(model, 1))
    request_id = api.forward_backward(batch(model, 2)).json["request_id"]
    answer = api.post("retrieve_future", {"request_id": request_id})
    assert answer.status_code == 408
    assert answer.json == {
        "type": "try_again",
        "request_id": request_id,
        "queue_state": "active",
        "queue_state_reason": "1 call runs before it",
    }


def test_a_poll_learns_when_no_worker_can_run_what_it_waits_for(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.services.queue._STATE_SNAPSHOT_AGE_S", 0.0)
    request_id = ask(api, api.sampler())
    api.services.records.delete(Worker.namespace, "sampler-0")
    paused = api.post("retrieve_future", {"request_id": request_id}).json
    assert (paused["queue_state"], paused["queue_state_reason"]) == (
        "paused_capacity",
        f"no sampler of {BASE} is running",
    )
    add_worker(api.services, "sampler")
    active = api.post("retrieve_future", {"request_id": request_id}).json
    assert (active["queue_state"], active["queue_state_reason"]) == ("active", "it runs now, or starts next")


def test_a_held_poll_wakes_when_the_result_is_committed(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    model = api.model()
    request_id = api.forward_backward(batch(model, 1)).json["request_id"]
    patient = api.services.settings.api.model_copy(update={"poll_hold_s": 60.0})
    monkeypatch.setattr(api.services.polls._polls._in_threads, "_settings", patient)
    answers: list[tuple[int, bytes, str]] = []
    poller = threading.Thread(target=lambda: answers.append(poll(api, request_id)), daemon=True)
    poller.start()
    api.commit(model, 1)
    poller.join(timeout=30)
    assert answers == [(200, b"{}", "application/json")]


def test_a_suspended_poll_is_resumed_by_its_result_and_counted_once_with_its_whole_time(api: Api) -> None:
    model, resumed = api.model(), threading.Event()
    request_id = api.forward_backward(batch(model, 1)).json["request_id"]
    suspension = Suspension(lambda suspension: resumed.set())
    suspension.began -= 1000

    def ask() -> TestResponse:
        body = {"request_id": request_id, "allow_metadata_only": True}
        return api.post("retrieve_future", body, environ_overrides={SUSPENSION: suspension})

    count, seconds = counted_polls()
    ask()
    assert suspension.is_suspended
    api.commit(model, 1)
    assert resumed.wait(60)
    suspension.end()
    answer = ask()
    assert (answer.status_code, answer.data) == (200, b"{}")
    later_count, later_seconds = counted_polls()
    assert later_count == count + 1
    assert later_seconds > seconds + 1000


def counted_polls() -> tuple[float, float]:
    """Number and seconds of the polls so far."""
    samples = [sample for sample in REQUEST_SECONDS.collect()[0].samples if "retrieve_future" in sample.labels["route"]]
    number, seconds = (
        sum(sample.value for sample in samples if sample.name.endswith(part)) for part in ("_count", "_sum")
    )
    return number, seconds


def test_a_suspended_batch_poll_is_resumed_when_any_of_its_requests_ends(api: Api) -> None:
    sampler, resumed = api.sampler(), threading.Event()
    waited = ask(api, sampler)
    suspension = Suspension(lambda suspension: resumed.set())
    given = {
        "target": {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0},
        "prev_cursor": 0,
        "retrieved_request_ids": [],
    }
    api.post("retrieve_futures", given, environ_overrides={SUSPENSION: suspension})
    api.services.oplog.finish_sample(waited, Result(b"x", PROTOBUF))
    assert resumed.wait(60)
    suspension.end()
    answer = api.post("retrieve_futures", given, environ_overrides={SUSPENSION: suspension}).json
    assert [c["request_id"] for c in answer["completions"]] == [waited]


def test_missing_and_foreign_futures_look_alike(api: Api, stranger: Api) -> None:
    model = api.model()
    foreign = poll(stranger, f"{model}:0")
    with connect(api.services.settings.redis.url) as client:
        client.flushall()
    assert foreign == poll(api, f"{model}:0")
    assert foreign[0] == 404


@pytest.mark.parametrize("request_id", ["x", "a:b", "a:train:0:z", ":", "a:train:0:-1"])
def test_a_made_up_id_is_a_404(api: Api, request_id: str) -> None:
    assert poll(api, request_id)[0] == 404


def test_ones_own_expired_result_is_gone(api: Api) -> None:
    model = api.model()
    with connect(api.services.settings.redis.url) as client:
        client.delete(keys.future(f"{model}:0"))
    assert poll(api, f"{model}:0")[0] == 410


def test_a_state_server_that_is_away_is_a_503_for_polls_too(settings: Settings) -> None:
    away = RedisSettings(url=f"redis://127.0.0.1:{free_port()}/0")
    client = create_app(settings.model_copy(update={"redis": away})).test_client()
    for path in ("retrieve_future", "get_info"):
        body = {"request_id": "s:train:0:1", "model_id": "s:train:0"}
        answer = client.post(f"{API}/{path}", json=body, headers={"X-API-Key": KEY})
        assert (answer.status_code, answer.json["error"]) == (503, "Unavailable")
        assert float(answer.headers["Retry-After"]) > 0


def test_a_poll_whose_account_key_cannot_be_looked_up_is_held_for_a_moment_as_the_sdk_polls_again_at_once(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = RedisSettings(url=f"redis://127.0.0.1:{free_port()}/0")
    client = create_app(settings.model_copy(update={"redis": away})).test_client()
    suspension = Suspension(lambda suspension: None)
    suspension.suspend(0, lambda: None)
    suspension.end()
    slept: list[float] = []
    monkeypatch.setattr("app.services.polling.time", SimpleNamespace(sleep=slept.append))

    def ask(path: str, environ: dict[str, Any] | None = None) -> None:
        body = {"request_id": "s:train:0:1", "model_id": "s:train:0"}
        headers = {"X-API-Key": "tml-0123456789ab.secret"}
        answer = client.post(f"{API}/{path}", json=body, headers=headers, environ_overrides=environ)
        assert (answer.status_code, answer.json["error"]) == (503, "Unavailable")

    ask("get_info")
    ask("retrieve_future", {SUSPENSION: suspension})
    assert not slept, "a poll that was suspended has been held already"
    ask("retrieve_future")
    assert slept == [settings.api.poll_hold_s]


def test_a_batch_poll_reports_every_end_as_the_sdk_reads_it(api: Api) -> None:
    sampler = api.sampler()
    done, failed, pending = (ask(api, sampler, seq) for seq in range(3))
    api.services.oplog.finish_sample(done, Result(b"12345", PROTOBUF))
    api.services.oplog.finish_sample(failed, Result(b"{}", failed=True))
    answer = FuturesRetrieveResponse.model_validate(poll_all(api, sampler).json)
    assert [(c.request_id, c.state) for c in answer.completions] == [(done, "finished"), (failed, "failed")]
    assert answer.completions[0].response_payload_uncompressed_size == 5
    api.services.oplog.finish_sample(pending, Result(b"x", PROTOBUF))
    later = poll_all(api, sampler, prev_cursor=answer.cursor, retrieved_request_ids=[done, failed]).json
    assert [c["request_id"] for c in later["completions"]] == [pending]
    assert poll_all(api, sampler, prev_cursor=later["cursor"], timeout=0.0).json["completions"] == []


def test_a_batch_poll_wakes_when_any_of_its_requests_ends(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = api.sampler()
    waited = ask(api, sampler, 3 * 10**9 + 1)
    patient = api.services.settings.api.model_copy(update={"poll_hold_s": 60.0})
    monkeypatch.setattr(api.services.batch_polls._polls._in_threads, "_settings", patient)
    answers: list[Any] = []
    poller = threading.Thread(target=lambda: answers.append(poll_all(api, sampler, clone=3).json), daemon=True)
    poller.start()
    api.services.oplog.finish_sample(waited, Result(b"x", PROTOBUF))
    poller.join(timeout=30)
    assert [c["request_id"] for c in answers[0]["completions"]] == [waited]


def test_another_ones_sampler_looks_missing_to_a_batch_poll_which_acknowledges_nothing(api: Api, stranger: Api) -> None:
    sampler, other = api.sampler(), stranger.sampler()
    done = ask(api, sampler)
    api.services.oplog.finish_sample(done, Result(b"x", PROTOBUF))
    with connect(api.services.settings.redis.url) as client:
        before = client.ttl(keys.future(done))
        foreign = poll_all(stranger, sampler, retrieved_request_ids=[done])
        poll_all(stranger, other, retrieved_request_ids=[done])
        assert client.ttl(keys.future(done)) > before - 60
    api.services.records.delete("samplers", sampler)
    missing = poll_all(api, sampler)
    assert (foreign.status_code, foreign.data) == (404, missing.data)


@pytest.mark.parametrize(
    "change", [{"prev_cursor": -1}, {"timeout": -1}, {"target": {}}, {"target": {"type": "x"}}, {"clone": -1}]
)
def test_a_batch_poll_that_makes_no_sense_is_a_422(api: Api, change: dict[str, Any]) -> None:
    assert poll_all(api, api.sampler(), **change).status_code == 422


def test_a_cancelled_sample_fails_and_frees_its_place(api: Api) -> None:
    sampler = api.sampler()
    request_id = ask(api, sampler)
    assert api.post("cancel_future", {"request_id": request_id}).status_code == 200
    assert api.post("cancel_future", {"request_id": request_id}).status_code == 200
    status, body, _ = poll(api, request_id)
    assert (status, json.loads(body)["category"]) == (200, "user")
    assert api.services.oplog.pending() == []


def test_a_result_that_is_there_is_not_cancelled(api: Api) -> None:
    request_id = ask(api, api.sampler())
    api.services.oplog.finish_sample(request_id, Result(b"done", PROTOBUF))
    assert api.post("cancel_future", {"request_id": request_id}).status_code == 200
    assert poll(api, request_id) == (200, b"done", PROTOBUF)


def test_only_ones_own_samples_can_be_cancelled(api: Api, stranger: Api) -> None:
    model = api.model()
    step = api.post("optim_step", {"model_id": model, "seq_id": 1}).json["request_id"]
    refused = api.post("cancel_future", {"request_id": step})
    assert (refused.status_code, "optim_step" in refused.json["detail"]) == (400, True)
    sample = ask(api, api.sampler())
    foreign = stranger.post("cancel_future", {"request_id": sample})
    unknown = stranger.post("cancel_future", {"request_id": sample + "7"})
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.json["detail"] == f"future {sample!r} does not exist"
    assert poll(api, sample)[0] == 408, "it goes on"
    assert api.post("cancel_future", {"request_id": "a:train:0:z"}).status_code == 404
