"""Keys and secrets stay out of logs, answers, Redis and Celery's messages. So do prompts, except for the journal."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from app import create_app
from app.api.base import EXTENSION
from app.settings import RedisSettings, Settings, StoreSettings, TracingSettings, hash_key
from app.stores.redis.client import connect
from tests.api_server import start_api
from tests.logs import everything_logged
from tests.security.test_tenants import Call, calls, path_of
from tests.servers import free_port
from tests.unit.app.conftest import Api, add_worker, batch

KEY_CANARY = "tml-canary-5a1e7b"
WRONG_CANARY = "tml-wrong-canary-91c0"
SECRET_CANARY = "url-secret-canary-77f2-0123456789abcdef"
CANARIES = (KEY_CANARY, WRONG_CANARY, SECRET_CANARY)
OURS, WRONG = {"X-API-Key": KEY_CANARY}, {"Authorization": f"Bearer {WRONG_CANARY}"}
PROMPT = [101, 102, 103, 104, 105, 106]


@pytest.fixture
def lines() -> Iterator[StringIO]:
    with everything_logged() as stream:
        yield stream


@pytest.fixture
def canary(settings: Settings, state_url: str) -> Api:
    with connect(state_url) as state:
        state.flushall()
        # Compression is off, because a long text in a dump would be compressed and not be found.
        state.config_set("rdbcompression", "no")
    return started(settings)


def started(settings: Settings, **changes: object) -> Api:
    """An API with canaries as its key and secret."""
    secrets = {"api_keys": (hash_key(KEY_CANARY),), "operator_keys": (), "url_secret": SECRET_CANARY}
    app = create_app(settings.model_copy(update={**secrets, **changes}))
    services = app.extensions[EXTENSION]
    for role in ("trainer", "sampler"):
        add_worker(services, role)
    return Api(app.test_client(), services, KEY_CANARY)


def test_no_secret_is_in_any_log_answer_redis_key_or_message(canary: Api, state_url: str, lines: StringIO) -> None:
    answers = [_answer(canary, label, call, key) for label, call in calls(canary).items() for key in (OURS, WRONG)]
    canary.post("telemetry", {"events": [{"key": KEY_CANARY}]})
    answers.append(canary.get("get_server_capabilities").data)
    answers.extend(canary.client.get(path).data for path in ("/metrics", "/readyz", "/openapi.json"))
    model = canary.model(canary.session())
    canary.forward_backward(batch(model, 1, tokens=PROMPT, target_tokens=PROMPT))
    stored = _dump(state_url) + _dump(canary.services.settings.broker_url)
    assert model.encode() in stored, "the dump holds what is stored"
    assert model in lines.getvalue(), "the log holds what is logged"
    for secret in CANARIES:
        for form in (secret.encode(), base64.b64encode(secret.encode()).rstrip(b"=")):
            assert form not in stored
            assert form.decode() not in lines.getvalue()
            assert [answer for answer in answers if form in answer] == []


def test_a_celery_message_names_the_call_and_holds_nothing_of_it(canary: Api) -> None:
    model = canary.model()
    with connect(canary.services.settings.broker_url) as broker:
        broker.flushdb()
        canary.forward_backward(batch(model, 1, tokens=PROMPT, target_tokens=PROMPT))
        (queue,) = broker.scan_iter("train.*")
        (message,) = [json.loads(entry) for entry in broker.lrange(queue, 0, -1)]
    args, kwargs, _ = json.loads(base64.b64decode(message["body"]))
    assert (args, kwargs) == ([], {"model_id": model})
    assert message["content-type"] == "application/json"


def test_prompts_are_in_no_log_line(canary: Api, lines: StringIO) -> None:
    model = canary.model()
    canary.forward_backward(batch(model, 1, tokens=PROMPT, target_tokens=[*PROMPT[1:], 10**6]))
    canary.post("forward_backward", {"model_id": model, "seq_id": 2, "forward_backward_input": {"data": PROMPT}})
    assert model in lines.getvalue()
    assert str(PROMPT)[1:-1] not in lines.getvalue()


def test_a_password_in_a_url_is_not_logged_when_its_server_is_away(canary: Api, lines: StringIO) -> None:
    state = canary.services.settings.redis.url
    away = f"redis://:{SECRET_CANARY}@127.0.0.1:{free_port()}/0"
    started(canary.services.settings, redis=RedisSettings(url=state, broker_url=away)).model()
    assert "could not dispatch" in lines.getvalue()
    assert SECRET_CANARY not in lines.getvalue()


def test_a_request_that_gunicorn_cannot_read_is_not_logged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    start = "POST /api/v1/asample HTTP/1.1\r\nHost: x\r\n"
    unreadable = {
        "no colon": f"{start}Authorization Bearer {KEY_CANARY}\r\n\r\n",
        "no name": f"{start}X API Key: {KEY_CANARY}\r\n\r\n",
        "folded": f"{start}Authorization: Bearer\r\n {KEY_CANARY}\r\n\r\n",
        "key as method": f"{KEY_CANARY} / HTTP/1.1\r\n\r\n",
        "key as line": f"X-API-Key: {KEY_CANARY}\r\n\r\n",
        "key as version": f"GET / {KEY_CANARY}\r\n\r\n",
        "key as coding": f"{start}Transfer-Encoding: {KEY_CANARY}\r\n\r\n",
        "key as expectation": f"{start}Expect: {KEY_CANARY}\r\nContent-Length: 1\r\n\r\n",
        "key as chunk": f"{start}Transfer-Encoding: chunked\r\n\r\n{KEY_CANARY}\r\n",
    }
    with start_api(tmp_path) as api:
        answers = {what: _status(api.port, request) for what, request in unreadable.items()}
    logged = capfd.readouterr().err
    assert not {what: status for what, status in answers.items() if not 400 <= status <= 501}
    assert "Invalid request from ip=127.0.0.1" in logged
    assert KEY_CANARY not in logged


def test_settings_do_not_show_their_secrets(tmp_path: Path) -> None:
    shown = repr(
        Settings(
            data_dir=tmp_path,
            url_secret=SECRET_CANARY,
            capture_secret=SECRET_CANARY,
            redis=RedisSettings(
                url=f"redis://:{SECRET_CANARY}@redis:6379/0", broker_url=f"redis://:{SECRET_CANARY}@broker:6379/0"
            ),
            store=StoreSettings(access_key=SECRET_CANARY, secret_key=SECRET_CANARY),
            tracing=TracingSettings(endpoint=f"http://user:{SECRET_CANARY}@collector:4318"),
        )
    )
    assert SECRET_CANARY not in shown


def _answer(api: Api, label: str, call: Call, headers: dict[str, str]) -> bytes:
    body: bytes = api.client.open(
        path_of(label, call.names), method=label.split()[0], json=call.body, headers=headers
    ).data
    return body


def _status(port: int, request: str) -> int:
    with contextlib.closing(socket.create_connection(("127.0.0.1", port), timeout=120)) as connection:
        connection.sendall(request.encode())
        return int(connection.makefile("rb").readline().split()[1])


def _dump(url: str) -> bytes:
    """Every key and value of a database."""
    with connect(url) as client:
        return b"".join(key + (client.dump(key) or b"") for key in client.scan_iter("*"))
