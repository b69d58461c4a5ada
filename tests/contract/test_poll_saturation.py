"""Long polls never starve the rest of the API."""

from __future__ import annotations

import http.client
import json
import select
import socket
import time
from collections.abc import Iterator

import pytest
import requests

from app.domain.results import Result
from app.suspension import SUSPENDED_A_THREAD
from ops.bench.metrics import read
from tests.api_server import BASE, KEY, ApiServer, start_api

CAPACITY = 60
POLLS = CAPACITY * SUSPENDED_A_THREAD
THREADS = 4
# Far longer than the test takes.
HOLD_S = 600
HEADERS = {"X-API-Key": KEY}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GUNICORN_CMD_ARGS", f"--threads {THREADS}")
        with start_api(tmp_path_factory.mktemp("api"), f"poll_capacity = {CAPACITY}\npoll_hold_s = {HOLD_S}") as server:
            yield server


def post(api: ApiServer, path: str, body: dict[str, object]) -> requests.Response:
    return requests.post(f"{api.url}/api/v1/{path}", json=body, headers=HEADERS, timeout=240)


def pending_future(api: ApiServer) -> tuple[str, str, str]:
    """Returns (session, model, request id) of a create_model that no trainer takes."""
    session = post(api, "create_session", {"sdk_version": "0.38.0", "tags": []}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
    return session, f"{session}:train:0", post(api, "create_model", body).json()["request_id"]


def hold(api: ApiServer, request_id: str) -> socket.socket:
    """Sends a poll and leaves its answer unread."""
    body = json.dumps({"request_id": request_id, "allow_metadata_only": False})
    poll = socket.create_connection(("127.0.0.1", api.port))
    head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY}\r\nContent-Type: application/json\r\n"
    poll.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return poll


def answer(poll: socket.socket) -> bytes:
    """Body of the answer, once it arrives."""
    with http.client.HTTPResponse(poll) as response:
        response.begin()
        return response.read()


def answered(polls: list[socket.socket]) -> int:
    ready = select.poll()
    for poll in polls:
        ready.register(poll, select.POLLIN)
    return len(ready.poll(0))


def test_far_more_polls_than_threads_are_held_while_others_are_answered_and_then_get_their_results(api: ApiServer):
    futures = [pending_future(api) for _ in range(10)]
    polls = [hold(api, request_id) for _, _, request_id in futures for _ in range(POLLS // len(futures))]
    try:
        await_held(api, POLLS)
        for _ in range(50):
            beat = post(api, "session_heartbeat", {"session_id": futures[0][0], "type": "session_heartbeat"})
            assert beat.status_code == 200
        assert answered(polls) == 0, "polls within the capacity keep their full hold"
        for _, model, _ in futures:
            complete(api, model)
        assert all(b"woken" in answer(poll) for poll in polls)
        await_held(api, 0)
    finally:
        for poll in polls:
            poll.close()


def test_polls_whose_clients_have_left_are_held_no_longer(api: ApiServer):
    _, model, request_id = pending_future(api)
    polls = [hold(api, request_id) for _ in range(20)]
    await_held(api, 20)
    for poll in polls[1:]:
        poll.close()
    await_held(api, 1)
    complete(api, model)
    assert b"woken" in answer(polls[0])
    polls[0].close()


def complete(api: ApiServer, model: str) -> None:
    lease = api.oplog.acquire(model, "test/1")
    assert api.oplog.next(lease, 0) is not None
    api.oplog.commit(lease, 0, Result(b'{"model_id": "woken"}'))


def await_held(api: ApiServer, count: int) -> None:
    """Waits until the server holds `count` polls. Their hold is far longer than that."""
    deadline = time.monotonic() + 120
    while (held := read(f"{api.url}/metrics")[("tinsmith_held_polls", frozenset())]) != count:
        assert time.monotonic() < deadline, f"{held:.0f} polls are held"
        time.sleep(0.05)


def test_the_sdk_learns_how_many_samples_fit(api: ApiServer):
    assert post(api, "client/config", {"sdk_version": "0.38.0"}).json()["sample_max_concurrent_requests"] == CAPACITY
