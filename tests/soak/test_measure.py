"""Counts of a server's memory and file descriptors, without what the system or its clients decide."""

from __future__ import annotations

import mmap
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil

from tests.soak.measure import anonymous, descriptors

# It obeys each line that it reads, and answers with a line.
SERVER = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
for line in sys.stdin:
    if line == "accept\\n":
        accepted = [server.accept()[0] for _ in range(5)]
    else:
        for connection in accepted[:3]:
            connection.close()
    print("done", flush=True)
"""


def test_connections_of_clients_do_not_count_and_those_that_the_server_forgets_to_close_do():
    command = [sys.executable, "-c", SERVER]
    with ExitStack() as opened:
        running = opened.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        )
        opened.callback(running.kill)

        def tell(order: str) -> None:
            running.stdin.write(f"{order}\n")
            assert running.stdout.readline() == "done\n"

        port, server = int(running.stdout.readline()), psutil.Process(running.pid)
        idle = descriptors(server, port)
        clients = [opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(5)]
        tell("accept")
        assert descriptors(server, port) == idle
        for client in clients[:3]:
            client.close()
        assert descriptors(server, port) == idle + 3, "their clients have gone"
        tell("close")
        assert descriptors(server, port) == idle


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
