from __future__ import annotations

from typing import Any

import pytest

from tests.unit.app.conftest import API, KEY, Api

DEEP = b"[" * 200_000


@pytest.mark.parametrize(
    ("path", "data", "content_type", "status"),
    [
        ("create_session", b"{not json", "application/json", 400),
        ("create_session", b"\xff\xfe", "application/json", 400),
        ("create_session", b"[]", "application/json", 422),
        ("session_heartbeat", b'{"session_id": "s"}', "text/plain", 400),
        ("optim_step", DEEP, "application/json", 413),
        ("optim_step", DEEP[:20_000], "application/json", 400),
        ("forward_backward", DEEP, "application/json", 400),
        ("forward_backward", b"{not json", "application/json", 400),
        ("forward_backward", b"[]", "application/json", 400),
        ("forward_backward", b"\xff\xff", "application/x-protobuf", 400),
        ("forward_backward", b"", "application/x-protobuf", 404),
        ("forward_backward", b"x" * (2**20 + 1), "application/x-protobuf", 413),
        ("optim_step", b"x" * (2**20 + 1), "application/json", 413),
        ("no_such_route", b"{}", "application/json", 404),
    ],
)
def test_a_body_that_cannot_be_served_is_a_4xx_that_says_why(
    api: Api, path: str, data: bytes, content_type: str, status: int
) -> None:
    answer = api.post(path, data=data, content_type=content_type)
    assert answer.status_code == status
    assert set(answer.json) == {"detail", "error"}
    assert answer.json["detail"]
    assert api.services.oplog.pending() == []


@pytest.mark.parametrize(("method", "tail", "status"), [("DELETE", "", 404), ("PUT", "/ttl", 405)])
def test_a_checkpoint_id_without_its_kind_is_answered_with_the_form_of_an_id(
    api: Api, method: str, tail: str, status: int
) -> None:
    url = f"/api/v1/training_runs/{api.model()}/checkpoints"
    headers = {"X-API-Key": KEY}
    complete = api.client.patch(f"{url}/weights/step-6", headers=headers)
    assert (complete.status_code, "a checkpoint id is" in complete.json["detail"]) == (405, False)
    answer = api.client.open(f"{url}/step-6{tail}", method=method, headers=headers)
    assert answer.status_code == status
    assert "a checkpoint id is weights/NAME, sampler_weights/NAME or external_weights/NAME" in answer.json["detail"]


def test_a_wrong_method_is_a_json_405(api: Api) -> None:
    answer = api.get("create_session")
    assert (answer.status_code, set(answer.json)) == (405, {"detail", "error"})


def test_an_unexpected_error_is_described_in_the_log_and_not_to_the_client(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("inner detail")

    monkeypatch.setattr(type(api.services.sessions), "create", fail)
    monkeypatch.setitem(api.client.application.config, "PROPAGATE_EXCEPTIONS", False)
    answer = api.client.post(f"{API}/create_session", json={}, headers={"X-API-Key": KEY})
    assert answer.status_code == 500
    assert "inner detail" not in answer.text
    assert "inner detail" in caplog.text


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ([], "Invalid input type."),
        ({"tags": 5}, "tags: Not a valid list. (got 5)"),
        ({"tags": ["a", 5]}, "tags.1: Not a valid string. (got 5)"),
        ({"sdk_version": {"a": 5}}, "sdk_version: Not a valid string."),
        ({"tags": ["a" * 513]}, f"tags.0: Longer than maximum length 512. (got '{'a' * 79})"),
    ],
)
def test_a_wrong_field_is_named_by_its_path_with_the_start_of_its_value(api: Api, body: Any, detail: str) -> None:
    assert api.post("create_session", body).json["detail"] == detail


def test_a_wrong_part_of_a_query_is_named(api: Api) -> None:
    assert api.get("training_runs?limit=x").json["detail"] == "limit: Not a valid integer. (got 'x')"
