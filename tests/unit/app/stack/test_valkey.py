"""The ports of the embedded servers stay the same from one stack to the next."""

from __future__ import annotations

import socket
from pathlib import Path

from app.stack import ports, valkey


def written(folder: Path, port: int) -> Path:
    valkey.command("valkey", folder, folder / "valkey.conf", port, "secret", valkey.DURABLE)
    return folder / "valkey.conf"


def test_a_server_gets_the_port_of_the_last_stack(tmp_path: Path) -> None:
    port = ports.free_port("127.0.0.1", 0)
    assert valkey.free_port(written(tmp_path, port), set()) == port


def test_a_port_that_is_taken_or_in_use_is_replaced(tmp_path: Path) -> None:
    port = ports.free_port("127.0.0.1", 0)
    assert valkey.free_port(written(tmp_path, port), {port}) != port
    with socket.create_server(("127.0.0.1", port)):
        assert valkey.free_port(written(tmp_path, port), set()) not in (0, port)


def test_the_first_stack_gets_any_free_port(tmp_path: Path) -> None:
    assert valkey.free_port(tmp_path / "valkey.conf", set()) > 0
