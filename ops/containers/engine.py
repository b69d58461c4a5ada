"""Docker engine of the container checks: the machine's own if it runs, else a private one.

The private engine is Debian's docker.io, with its data in build/containers. It runs in a network namespace, so that it
touches no address, port or firewall rule of the machine; from there it reaches nothing outside. Images are therefore
built by the same engine in the machine's own network, without any network for containers. Only one of the two runs at a
time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ops.containers import packages
from ops.containers.shell import FOLDER, answer, run, succeeds, wait_until

_RECORD = FOLDER / "engine.json"
_SOCKET = FOLDER / "docker.sock"
_CONFIG = FOLDER / "config"
_ENVIRON = {"DOCKER_HOST": f"unix://{_SOCKET}", "DOCKER_CONFIG": str(_CONFIG)}


class Task(StrEnum):
    BUILD = "build"
    RUN = "run"


_IN_A_NAMESPACE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
_PROLOGUES: dict[Task, tuple[str, ...]] = {Task.BUILD: (), Task.RUN: _IN_A_NAMESPACE}
_OPTIONS = {
    Task.BUILD: ("--bridge=none", "--iptables=false", "--ip-forward=false"),
    Task.RUN: ("--userland-proxy=false",),
}


@dataclass(frozen=True, slots=True)
class Engine:
    """A running Docker engine. `pid` is that of the private engine, and None for the machine's, which fits any task."""

    pid: int | None = None
    task: Task = Task.RUN

    @property
    def enter(self) -> tuple[str, ...]:
        """Prefix of a command that must reach the published ports of the containers."""
        return ("nsenter", "--net", "--target", str(self.pid)) if self.pid else ()

    def docker(self, *arguments: str | Path) -> str:
        """Runs `docker ARGUMENTS` and returns its output. Raises RuntimeError with the output when it fails."""
        return answer(["docker", *arguments], self._environ)

    def show(self, *arguments: str | Path) -> None:
        """Runs `docker ARGUMENTS` with its output on the terminal. Raises CalledProcessError."""
        run(["docker", *arguments], self._environ)

    def logs(self, container: str) -> str:
        return answer(["sh", "-c", 'docker logs "$1" 2>&1', "sh", container], self._environ)

    def has_image(self, name: str) -> bool:
        return succeeds(["docker", "image", "inspect", name], self._environ)

    def pulls(self, name: str) -> bool:
        return succeeds(["docker", "pull", "--quiet", name], self._environ)

    @property
    def _environ(self) -> dict[str, str]:
        return _ENVIRON if self.pid else {}


def get(task: Task) -> Engine:
    """Returns the engine for the task, and starts it if needed. Raises RuntimeError when it does not start."""
    engine = running()
    if engine and (engine.pid is None or engine.task is task):
        return engine
    packages.install()
    packages.install_compose(_CONFIG)
    stop()
    return _start(task)


def running() -> Engine | None:
    """The running engine: the machine's, or else the private one."""
    return Engine() if succeeds(["docker", "info"]) else _ours()


def stop() -> None:
    """Stops the private engine, if it runs, with all of its containers. A second stop does nothing."""
    engine = _ours()
    if engine and engine.pid:
        os.kill(engine.pid, signal.SIGTERM)
        wait_until("the end of our engine", lambda: _ours() is None)
    _RECORD.unlink(missing_ok=True)


def _start(task: Task) -> Engine:
    FOLDER.mkdir(parents=True, exist_ok=True)
    folders: list[str | Path] = [
        "--data-root",
        FOLDER / "data",
        "--exec-root",
        FOLDER / "exec",
        "--pidfile",
        FOLDER / "docker.pid",
    ]
    options = ["--host", f"unix://{_SOCKET}", "--storage-driver", "overlay2"]
    command = [*_PROLOGUES[task], "dockerd", *folders, *options, *_OPTIONS[task]]
    with (FOLDER / "engine.log").open("ab") as log:
        engine = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    _RECORD.write_text(json.dumps({"pid": engine.pid, "task": task}))

    def is_up() -> bool:
        if engine.poll() is not None:
            raise RuntimeError(f"the Docker engine did not start; see {FOLDER / 'engine.log'}")
        return succeeds(["docker", "info"], _ENVIRON)

    wait_until("the start of our engine", is_up)
    return Engine(engine.pid, task)


def _ours() -> Engine | None:
    """The private engine, if it is alive: its pid may belong to another process now."""
    try:
        record = json.loads(_RECORD.read_text())
        command = Path(f"/proc/{record['pid']}/cmdline").read_bytes()
    except FileNotFoundError:
        return None
    return Engine(record["pid"], Task(record["task"])) if bytes(_SOCKET) in command else None
