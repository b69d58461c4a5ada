"""The processes of a running stack listen on loopback only: nobody beyond the machine reaches one without a key."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from pathlib import Path

import tinker

from app.stack.child import family
from tests.contract.data import train
from tests.contract.stack import Stack

_LISTEN = "0A"
# vLLM's engine opens a torch store of its own: SECURITY.md leaves its ports to the network.
_VLLM = "VLLM"


def test_no_process_listens_beyond_loopback(training: tinker.TrainingClient, stack: Stack) -> None:
    train(training, 1)
    assert stack.process is not None
    found = {pid: listening(pid) for pid in family(stack.process.pid)}
    assert sum(map(len, found.values())) >= 2, "the API and a worker's metrics at least"
    beyond = {title(pid): each for pid, places in found.items() for each in places if not each.startswith("127.")}
    assert {name: each for name, each in beyond.items() if _VLLM not in name} == {}


def listening(pid: int) -> list[str]:
    """Addresses on which the process listens, as "host:port", from the kernel's own tables."""
    sockets = set()
    with suppress(OSError):  # it has just ended
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(each.readlink().name)
    found = []
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            rows = [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
            found += [shown(row[1]) for row in rows if row[3] == _LISTEN and f"socket:[{row[9]}]" in sockets]
    return found


def shown(local: str) -> str:
    """The kernel writes an address as 32-bit words in the machine's own byte order."""
    address, port = local.split(":")
    words = [struct.pack("=I", int(address[at : at + 8], 16)) for at in range(0, len(address), 8)]
    kind = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    host = socket.inet_ntop(kind, b"".join(words)).removeprefix("::ffff:")
    return f"{'127.0.0.1' if host == '::1' else host}:{int(port, 16)}"


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
