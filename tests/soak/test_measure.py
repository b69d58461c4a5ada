"""Counts of a server's memory and file descriptors, without what the system or its clients decide."""

from __future__ import annotations

import mmap
import socket
from contextlib import ExitStack
from pathlib import Path

import psutil

from tests.soak.measure import anonymous, descriptors


def test_connections_of_clients_do_not_count_and_those_that_the_server_forgets_to_close_do():
    own = psutil.Process()
    with ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = server.getsockname()[1]
        idle = descriptors(own, port)
        clients = [opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(5)]
        accepted = [opened.enter_context(server.accept()[0]) for _ in clients]
        assert descriptors(own, port) - idle == len(clients), "the clients' ends, since they are of the same process"
        for client in clients[:3]:
            client.close()
        for connection in accepted[:3]:
            assert connection.recv(1) == b"", "its client has gone"
        assert descriptors(own, port) - idle == 2 + 3
        for connection in accepted[:3]:
            connection.close()
        assert descriptors(own, port) - idle == 2


def test_pages_of_a_file_do_not_count_and_written_memory_does(tmp_path: Path):
    own, size = psutil.Process(), 64 * 2**20
    (tmp_path / "file").write_bytes(bytes(size))
    before, rss = anonymous(own), own.memory_info().rss
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[page] for page in range(0, size, mmap.PAGESIZE)) == 0
        assert own.memory_info().rss - rss > size / 2
        assert abs(anonymous(own) - before) < size / 2
    written = bytearray(b"1" * size)
    assert anonymous(own) - before > size / 2
    del written
