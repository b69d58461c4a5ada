"""Runs one rank group over the hosts of a DeepSpeed hostfile, and on each of these hosts its share of the ranks.

The trainer's process starts a node (workers/node.py) on each host over ssh and watches the nodes. When one node ends,
all end. When this process ends, however it ends, each node loses its pipe and ends too. DeepSpeed's own launcher for
several nodes, pdsh, does neither, and stops a group by `pkill -f` of every DeepSpeed launch of its user. Its launcher
for one node waits for one rank after the other, each for 30 s, so a node kills it.

The first line on stdin says what to run. It also carries settings and secrets, so that they are on no command line
and in no environment another process can read. The lines after it are heartbeats, or say that another node has ended.
When stdin ends, or falls silent, the ranks here end too: rank 0 ends in order and releases the others, and the
remaining ranks are killed.
"""

from __future__ import annotations

import base64
import json
import os
import random
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

import tomli_w

from app.errors import SetupError
from app.settings import METRICS_PORT_VARIABLE, SETTINGS_VARIABLE, Settings
from app.stack import child
from app.stack.signals import stop_signals
from app.stack.supervisor import SETUP_ERROR_CODE

BEAT_S = 1.0
# A node gives its ranks this time before it kills them, all together.
RANKS_S = 30.0
# The same after another node has ended. It is less than the time after which rank 0 gives its Op back, as in an orderly
# stop: the Op may be why the other node has ended, so this is an attempt.
BROKEN_S = 5.0
_GRACE_S = RANKS_S + 15.0
_BROKEN = b"broken"
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")
# Environment variables that the ranks of one machine would inherit. Secrets are in the settings; both travel inside
# ssh's channel.
_EXPORTED = (
    *("CUDA_DEVICE_ORDER", "OMP_", "MKL_", "GLOO_", "NCCL_", "UCX_", "TORCH", "HF_", "DS_", "PYTHON"),
    METRICS_PORT_VARIABLE,
)

_TICK_S = 0.2
_PORTS = range(20_000, 32_768)
# ssh reports a lost connection after 30 s; this limit is for a host that says nothing.
SILENCE_S = 60.0


def run(
    hosts: Mapping[str, int], settings: Settings, name: str, command: Sequence[str], devices: Sequence[int] = ()
) -> int:
    """Runs `python -m *command` once per slot, under RANK, WORLD_SIZE, ...; returns when the whole group has ended.

    The code is 0 after a SIGTERM or SIGINT, else that of the first node, in the order of the hosts, that has ended.
    `name` is the group's name. A host with n slots uses the first n GPUs of `devices`, or its first n GPUs. Raises
    SetupError when `devices` has fewer.
    """
    orders = list(_orders(hosts, settings, command, devices))
    # Handlers only set a flag; the loop below does the rest.
    with stop_signals(signal.SIGTERM, signal.SIGINT) as stopping, _witness(settings, name) as witness:
        nodes = [_start(host) for host in hosts]
        for node, order in zip(nodes, orders, strict=True):
            _tell(node, json.dumps({"name": name, "witness": witness, **order}).encode())
        while not stopping.wait(BEAT_S) and all(node.poll() is None for node in nodes):
            for node in nodes:
                _tell(node, b"")
        ended = next((node.returncode for node in nodes if node.poll() is not None), 0)
        if not stopping.is_set():
            for node in nodes:
                _tell(node, _BROKEN)
        _end(nodes)
        return 0 if stopping.is_set() else ended


def _start(host: str) -> subprocess.Popen[bytes]:
    """Starts a node, which imports our code from where this process does."""
    paths = [f"{name}={os.environ[name]}" for name in ("PYTHONPATH", "PYTHONSAFEPATH") if name in os.environ]
    node = shlex.join(("exec", "env", *paths, sys.executable, "-m", "workers.node"))
    return subprocess.Popen([*_SSH, host, f"{shlex.join(('cd', str(Path.cwd())))} && {node}"], stdin=subprocess.PIPE)


def _orders(
    hosts: Mapping[str, int], settings: Settings, command: Sequence[str], devices: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """The first line that each node receives, in the order of the hosts."""
    gpus = {host: _gpus(host, slots, devices) for host, slots in hosts.items()}
    # DeepSpeed's launcher sets CUDA_VISIBLE_DEVICES to the host's numbers.
    world = json.dumps(gpus).encode()
    place = [
        f"--world_info={base64.urlsafe_b64encode(world).decode()}",
        f"--master_addr={next(iter(hosts))}",
        f"--master_port={free_port()}",
    ]
    shared = {
        "settings": tomli_w.dumps(settings.model_dump(mode="json", exclude_none=True)),
        "environ": {key: value for key, value in os.environ.items() if key.startswith(_EXPORTED)},
    }
    for rank in range(len(hosts)):
        launch = [*place, f"--node_rank={rank}", "--no_local_rank", "--module", *command]
        yield {**shared, "launch": launch}


def _gpus(host: str, slots: int, devices: Sequence[int]) -> list[int]:
    if devices and len(devices) < slots:
        raise SetupError(
            f"trainer.devices is {list(devices)}, but the hostfile gives {host} {slots} slots; name at least as many "
            "GPUs, which every host then has"
        )
    return list(devices or range(slots))[:slots]


def _tell(node: subprocess.Popen[bytes], line: bytes) -> None:
    assert node.stdin is not None
    with suppress(BrokenPipeError):  # it has ended, which the loop sees
        node.stdin.write(line + b"\n")
        node.stdin.flush()


def _end(nodes: list[subprocess.Popen[bytes]]) -> None:
    """Closes the pipes of the nodes, which then end their ranks."""
    for node in nodes:
        assert node.stdin is not None
        with suppress(BrokenPipeError):
            node.stdin.close()
    deadline = time.monotonic() + _GRACE_S
    for node in nodes:
        try:
            node.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            node.kill()


@contextmanager
def _witness(settings: Settings, name: str) -> Iterator[dict[str, str]]:
    """A file that shows a node that it shares the data folder: every rank reads the checkpoints rank 0 fetched.

    Other groups may share the folder, also one of this name on a host of this name.
    """
    token = secrets.token_hex()
    path = settings.data_dir.absolute() / "run" / f"{name}-{os.uname().nodename}-{token[:8]}.witness"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(token)
    try:
        yield {"path": str(path), "token": token}
    finally:
        path.unlink(missing_ok=True)


def free_port() -> int:
    """A port that is free here, and that no outgoing connection takes before rank 0 listens on it: those get ports from
    32768 (Linux's ip_local_port_range) on. The first host is this machine, or most likely has it free too; else the
    group starts again."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("", port))
            return port
    raise SetupError(f"none of 100 ports from {_PORTS.start} to {_PORTS.stop - 1} is free for the ranks")


class Lifeline:
    """A pipe whose other end sends heartbeats. `broken`: it said that another node has ended."""

    def __init__(self, pipe: FileIO) -> None:
        self.broken = False
        self._pipe = pipe
        self._heard = time.monotonic()
        self._ended = False
        threading.Thread(target=self._listen, daemon=True).start()

    def held(self) -> bool:
        return not self._ended and time.monotonic() - self._heard < SILENCE_S

    def _listen(self) -> None:
        for line in self._pipe:
            self._heard = time.monotonic()
            self.broken = self.broken or line.strip() == _BROKEN
        self._ended = True


def main() -> int:
    # No buffer: the lifeline's thread would still hold its lock when this process exits.
    pipe = FileIO(sys.stdin.fileno(), closefd=False)
    order = json.loads(pipe.readline())
    if not _shares_data(order["witness"]):
        folder = Path(order["witness"]["path"]).parents[1]
        print(
            f"{order['name']}: {os.uname().nodename} does not see the data folder {folder} of the first host: mount "
            "it there under the same path, because every rank reads checkpoints from it",
            file=sys.stderr,
        )
        return SETUP_ERROR_CODE
    child.adopt_orphans()
    with tempfile.NamedTemporaryFile("w", prefix="tinsmith-", suffix=".toml") as settings:
        settings.write(order["settings"])
        settings.flush()
        try:
            return _launch(order["launch"], {**order["environ"], SETTINGS_VARIABLE: settings.name}, pipe)
        finally:
            child.kill_strays(())


def _launch(arguments: list[str], environ: Mapping[str, str], pipe: FileIO) -> int:
    """Runs DeepSpeed's launcher for one node: it ends all of its ranks when one of them fails, or it gets a SIGTERM. If
    that takes too long, kills it and leaves ranks behind."""
    me = os.getpid()
    launcher = subprocess.Popen(
        [sys.executable, "-u", "-m", "deepspeed.launcher.launch", *arguments],
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: child.end_with(me),
    )
    lifeline = Lifeline(pipe)
    while launcher.poll() is None and lifeline.held():
        time.sleep(_TICK_S)
    launcher.terminate()
    with suppress(subprocess.TimeoutExpired):
        return launcher.wait(BROKEN_S if lifeline.broken else RANKS_S)
    launcher.kill()
    return launcher.wait()


def _shares_data(witness: Mapping[str, Any]) -> bool:
    try:
        return bool(Path(witness["path"]).read_text() == witness["token"])
    except OSError:
        return False
