"""Long polls never starve the rest of the API."""

from __future__ import annotations

import http.client
import json
import select
import socket
from collections.abc import Iterator

import pytest
import requests

from app.domain.results import Result
from tests.api_server import BASE, KEY, ApiServer, start_api

CAPACITY = 1000
BEYOND = 200
# Far longer than the test takes.
HOLD_S = 600
HEADERS = {"X-API-Key": KEY}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
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


def test_heartbeats_answer_while_more_polls_than_the_capacity_are_held(api: ApiServer):
    session, model, request_id = pending_future(api)
    polls = [hold(api, request_id) for _ in range(CAPACITY + BEYOND)]
    try:
        for _ in range(50):
            beat = post(api, "session_heartbeat", {"session_id": session, "type": "session_heartbeat"})
            assert beat.status_code == 200
        assert answered(polls) <= BEYOND, "polls within the capacity keep their full hold"
        lease = api.oplog.acquire(model, "test/1")
        assert api.oplog.next(lease, 0) is not None
        api.oplog.commit(lease, 0, Result(b'{"model_id": "woken"}'))
        woken = [answer(poll) for poll in polls[:CAPACITY]]
        assert sum(b"woken" in body for body in woken) >= CAPACITY - BEYOND
    finally:
        for poll in polls:
            poll.close()


def test_the_sdk_learns_how_many_samples_fit(api: ApiServer):
    assert post(api, "client/config", {"sdk_version": "0.38.0"}).json()["sample_max_concurrent_requests"] == CAPACITY
