"""Counts a server's file descriptors without those that its clients keep open."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import psutil

from tests.soak.measure import descriptors


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
