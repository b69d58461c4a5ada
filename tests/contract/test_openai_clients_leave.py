"""Clients that disconnect during a call, against the API as gunicorn serves it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from tests.api_server import BASE, KEY, ApiServer, start_api
from tests.contract.awaiting import await_true
from tests.tokenizers import byte_tokenizer


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    folder = tmp_path_factory.mktemp("api")
    byte_tokenizer(folder)
    with start_api(folder) as server:
        yield server


def call(api: ApiServer, **body: object) -> socket.socket:
    """Sends a call and never reads its answer."""
    content = json.dumps({"model": BASE, "prompt": "ab", **body})
    head = f"POST /oai/api/v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    connection = socket.create_connection(("127.0.0.1", api.port))
    kind = f"Content-Type: application/json\r\nContent-Length: {len(content)}"
    connection.sendall(f"{head}{kind}\r\n\r\n{content}".encode())
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_whose_client_went_away_is_cancelled_and_one_whose_client_waits_is_not(api: ApiServer, stream: bool):
    staying = call(api, stream=stream)
    await_true(lambda: len(api.oplog.pending()) == 1, "the call is taken in")
    (kept,) = api.oplog.pending()
    leaving = call(api, stream=stream)
    await_true(lambda: len(api.oplog.pending()) == 2, "the other is taken in")
    leaving.close()
    await_true(lambda: len(api.oplog.pending()) == 1, "the one whose client left is cancelled")
    assert api.oplog.pending()[0].id == kept.id
    staying.close()
    await_true(lambda: not api.oplog.pending(), "and so is the other")
