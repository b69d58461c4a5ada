from __future__ import annotations

import threading

import pytest

from app import create_app
from app.domain.results import PROTOBUF, Result
from app.settings import RedisSettings, Settings
from app.stores.redis import keys
from app.stores.redis.client import connect
from tests.servers import free_port
from tests.unit.app.conftest import API, KEY, Api, batch


def poll(api: Api, request_id: str) -> tuple[int, bytes, str]:
    answer = api.post("retrieve_future", {"request_id": request_id, "allow_metadata_only": True})
    return answer.status_code, answer.data, answer.content_type


def test_a_finished_result_comes_back_unchanged_and_again(api: Api) -> None:
    model = api.model()
    api.forward_backward(batch(model, 1))
    api.commit(model, 1, Result(b"\x00\xff bytes", PROTOBUF))
    assert poll(api, f"{model}:1") == (200, b"\x00\xff bytes", PROTOBUF)
    assert poll(api, f"{model}:1") == (200, b"\x00\xff bytes", PROTOBUF)


def test_a_failed_future_is_a_200_with_its_error(api: Api) -> None:
    model = api.model()
    api.forward_backward(batch(model, 1))
    body = b'{"error": "too much", "category": "user"}'
    api.commit(model, 1, Result(body, failed=True))
    assert poll(api, f"{model}:1") == (200, body, "application/json")


def test_a_poll_that_is_not_ready_says_try_again(api: Api) -> None:
    model = api.model()
    request_id = api.forward_backward(batch(model, 1)).json["request_id"]
    answer = api.post("retrieve_future", {"request_id": request_id})
    assert answer.status_code == 408
    assert answer.json == {"type": "try_again", "request_id": request_id, "queue_state": "active"}


def test_a_held_poll_wakes_when_the_result_is_committed(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    model = api.model()
    request_id = api.forward_backward(batch(model, 1)).json["request_id"]
    patient = api.services.settings.api.model_copy(update={"poll_hold_s": 60.0})
    monkeypatch.setattr(api.services.polls, "_settings", patient)
    answers: list[tuple[int, bytes, str]] = []
    poller = threading.Thread(target=lambda: answers.append(poll(api, request_id)), daemon=True)
    poller.start()
    api.commit(model, 1)
    poller.join(timeout=30)
    assert answers == [(200, b"{}", "application/json")]


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
