"""A body counts once all of it has arrived. The tests stand in for gunicorn, whose streams end where a client stops."""

from __future__ import annotations

import io
from typing import Any
from urllib.parse import urlsplit

import pytest
from werkzeug.test import TestResponse

from app.settings import Settings
from tests.protobuf_bytes import field
from tests.unit.app.api.test_uploads import start
from tests.unit.app.conftest import API, Api, batch


def send(api: Api, path: str, body: bytes, *, stated: int | None, method: str = "POST", **headers: str) -> TestResponse:
    """Sends a body whose Content-Length is `stated`; None sends it in chunks, without a length."""
    environ: dict[str, Any] = {"wsgi.input": io.BytesIO(body), "wsgi.input_terminated": True}
    environ["CONTENT_LENGTH" if stated is not None else "HTTP_TRANSFER_ENCODING"] = str(stated or "chunked")
    return api.client.open(path, method=method, headers=headers, environ_overrides=environ)


def send_batch(api: Api, body: bytes, *, stated: int | None) -> TestResponse:
    headers = {"X-API-Key": api.key, "Content-Type": "application/x-protobuf"}
    return send(api, f"{API}/forward_backward", body, stated=stated, **headers)


def stored(api: Api) -> dict[str, bytes]:
    """The files of all uploads."""
    objects = api.services.objects
    return {key: objects.read(key) for key in objects.list("uploads/")}


def test_a_batch_that_ends_before_its_length_is_refused_and_consumes_no_seq(api: Api) -> None:
    """Its first fields alone are a batch as well."""
    model = api.model()
    some = batch(model, 1).SerializeToString()
    whole = some + field(100, b"the last field")
    answer = send_batch(api, some, stated=len(whole))
    assert (answer.status_code, f"after {len(some)} bytes" in answer.json["detail"]) == (400, True)
    assert api.ops(model) == [0]
    assert send_batch(api, whole, stated=len(whole)).status_code == 200
    assert api.ops(model) == [0, 1]


class CutChunks(io.BytesIO):
    """A body in chunks whose client has gone: what arrived is read only behind the error, as from gunicorn."""

    has_failed = False

    def readinto(self, buffer: Any) -> int:
        if self.has_failed:
            return super().readinto(buffer)
        self.has_failed = True
        raise OSError("no more data")


def test_a_batch_in_chunks_that_ends_too_soon_consumes_no_seq(api: Api) -> None:
    model = api.model()
    environ: dict[str, Any] = {
        "wsgi.input": CutChunks(batch(model, 1).SerializeToString()),
        "wsgi.input_terminated": True,
        "HTTP_TRANSFER_ENCODING": "chunked",
    }
    headers = {"X-API-Key": api.key, "Content-Type": "application/x-protobuf"}
    assert api.client.post(f"{API}/forward_backward", headers=headers, environ_overrides=environ).status_code == 400
    assert api.ops(model) == [0]


def test_an_upload_that_ends_before_its_length_replaces_nothing(api: Api) -> None:
    url, *_ = start(api).json["urls"].values()
    parts = urlsplit(url)
    path = f"{parts.path}?{parts.query}"
    assert send(api, path, b"{}", stated=2, method="PUT").status_code == 200
    before = stored(api)
    assert send(api, path, b"[1", stated=9, method="PUT").status_code == 400
    assert stored(api) == before
    assert send(api, path, b"[1]", stated=3, method="PUT").status_code == 200
    assert stored(api) != before


@pytest.mark.parametrize("stated", [9, None])
def test_a_mistake_in_the_url_is_named_whatever_became_of_the_body(api: Api, stated: int | None) -> None:
    """The answer to it reads the body's JSON, for the values of the fields that it names."""
    body = b"{" if stated else b" " * (api.client.application.config["MAX_CONTENT_LENGTH"] + 1)
    url = f"{API}/uploads/5/x"
    answer = send(api, url, body, stated=stated, method="PUT", **{"Content-Type": "application/json"})
    assert (answer.status_code, "signature" in answer.json["detail"]) == (422, True), answer.text


def test_a_call_in_chunks_may_have_as_many_bytes_as_one_with_a_length(api: Api) -> None:
    """The bytes up to the limit are a call by themselves."""
    most = api.client.application.config["MAX_CONTENT_LENGTH"]
    body = b"{}" + b" " * (most - 2)
    headers = {"X-API-Key": api.key, "Content-Type": "application/json"}
    for more, status in ((0, 200), (1, 413), (2**17, 413)):
        for stated in (None, len(body) + more):
            answer = send(api, f"{API}/create_session", body + b" " * more, stated=stated, **headers)
            assert (more, stated, answer.status_code) == (more, stated, status)


def test_a_batch_in_chunks_over_the_limit_consumes_no_seq(api: Api, settings: Settings) -> None:
    """The bytes up to the limit are a batch by themselves."""
    model, most = api.model(), settings.api.max_body_bytes
    message = batch(model, 1).SerializeToString()
    whole = message + field(100, bytes(most - len(message) - 5))
    assert len(whole) == most
    assert send_batch(api, whole + field(101, b""), stated=None).status_code == 413
    assert api.ops(model) == [0]
    assert send_batch(api, whole, stated=None).status_code == 200


def test_an_upload_in_chunks_may_have_as_many_bytes_as_its_url_says(api: Api) -> None:
    url, *_ = start(api).json["urls"].values()
    parts = urlsplit(url)
    path = f"{parts.path}?{parts.query}"
    most = int(parts.path.split("/uploads/")[1].split("/")[0])
    assert send(api, path, bytes(most), stated=None, method="PUT").status_code == 200
    before = stored(api)
    assert send(api, path, b"x" * (most + 1), stated=None, method="PUT").status_code == 413
    assert stored(api) == before


class Endless(io.RawIOBase):
    """The connection itself: a read waits for the client's next request."""

    def readinto(self, _: object) -> int:
        pytest.fail("the connection was read")


def test_a_call_without_a_length_is_not_waited_for_on_a_server_that_does_not_end_its_streams(api: Api) -> None:
    headers = {"X-API-Key": api.key, "Content-Type": "application/json"}
    answer = api.client.post(f"{API}/create_session", headers=headers, environ_overrides={"wsgi.input": Endless()})
    assert (answer.status_code, "0 bytes" in answer.json["detail"]) == (400, True)
