"""Clients without a key that send or read slowly, or nothing: a real server with few threads answers everybody else."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator, Sequence

import pytest

from app.gunicorn_worker import ARRIVAL_S, ARRIVING
from tests.api_server import KEY, ApiServer, start_api

# More than all threads of the server, which has 16.
CLIENTS = 40
PUBLIC_FILE = "/docs/swagger-ui-bundle.js"
KEYLESS = b"POST /api/v1/asample HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
WRONG_KEY = KEYLESS + b"X-API-Key: tml-wrong\r\n"
STALLS = {
    "in the header": KEYLESS,
    "a small body without a key": KEYLESS + b"Content-Length: 100\r\n\r\n",
    "a small body with a wrong key": WRONG_KEY + b"Content-Length: 100\r\n\r\n",
    "a large body with a wrong key": WRONG_KEY + b"Content-Length: 1000000\r\n\r\n{",
    "a body in chunks with a wrong key": WRONG_KEY + b"Transfer-Encoding: chunked\r\n\r\n9\r\n",
}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with start_api(tmp_path_factory.mktemp("slow"), "spare_threads = 8\npoll_capacity = 8") as server:
        yield server


def test_clients_without_a_key_that_stall_take_no_thread(api: ApiServer) -> None:
    with contextlib.ExitStack() as stack:
        for stall in STALLS.values():
            for _ in range(CLIENTS):
                stack.enter_context(_connect(api)).sendall(stall)
        assert _status(api, "/api/v1/healthz") == 200
        assert _status(api, "/api/v1/limits", {"X-API-Key": KEY}) == 200


def test_the_address_with_the_most_unfinished_requests_loses_its_oldest(api: ApiServer) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(_connect(api)) for _ in range(ARRIVING + 2)]
        assert _status(api, "/api/v1/healthz") == 200
        clients[0].settimeout(ARRIVAL_S / 2)  # else it would end by its age
        assert clients[0].recv(1) == b""
        clients[-1].sendall(b"GET /api/v1/healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert clients[-1].recv(12) == b"HTTP/1.1 200"


def test_requests_that_come_in_pieces_or_together_are_answered_in_their_order(api: ApiServer) -> None:
    ask = b"GET /api/v1/%s HTTP/1.1\r\nHost: a\r\nX-API-Key: " + KEY.encode() + b"\r\n\r\n"
    with _connect(api) as client, client.makefile("rb") as answers:
        client.sendall(ask % b"healthz" + (ask % b"nowhere")[:30])
        assert _answer(answers) == 200
        client.sendall((ask % b"nowhere")[30:])
        assert _answer(answers) == 404


def test_an_endless_header_is_cut_off(api: ApiServer) -> None:
    with _connect(api) as client, contextlib.suppress(ConnectionError):
        client.settimeout(ARRIVAL_S / 2)  # else it would end by its age
        client.sendall(KEYLESS + b"X-Filler: " + b"a" * 2**20)
        assert client.recv(1) == b""


def test_clients_that_read_slowly_take_no_thread_that_others_need(api: ApiServer) -> None:
    ended = threading.Event()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(_slow_reader(api)) for _ in range(2 * CLIENTS)]
        reader = threading.Thread(target=_trickle, args=(clients, ended))
        reader.start()
        stack.callback(reader.join)
        stack.callback(ended.set)
        assert _status(api, "/api/v1/healthz") == 200
        assert _status(api, PUBLIC_FILE) == 200


def _slow_reader(api: ApiServer) -> socket.socket:
    """A client that has asked for a file of 1 MB, most of which the server cannot send before the client reads."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    made.connect(("127.0.0.1", api.port))
    made.sendall(f"GET {PUBLIC_FILE} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    return made


def _trickle(clients: Sequence[socket.socket], ended: threading.Event) -> None:
    """Reads a little from every client, again and again."""
    while not ended.wait(0.5):
        for client in clients:
            with contextlib.suppress(OSError):
                client.recv(512, socket.MSG_DONTWAIT)


def _connect(api: ApiServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", api.port), timeout=60)


def _status(api: ApiServer, path: str, headers: dict[str, str] | None = None) -> int:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", api.port, timeout=60)) as connection:
        connection.request("GET", path, headers=headers or {})
        answer = connection.getresponse()
        answer.read()
        return answer.status


def _answer(answers: socket.SocketIO) -> int:
    """Reads one response, and returns its status."""
    status, length = int(answers.readline().split()[1]), 0
    while (line := answers.readline().strip().lower()) != b"":
        if line.startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    answers.read(length)
    return status
