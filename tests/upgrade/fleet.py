"""An API, trainers and samplers of several commits at once, on one state server and one object folder.

Redis keys are written out here, because no commit may change them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import redis
import tinker
import tomli_w

from tests.contract.awaiting import await_true
from tests.contract.stack import API_KEY, BASE, code_of
from tests.servers import free_port, start_valkey

# Time in which an undisturbed process ends: engines transfer their work.
_ENDS_S = 120
_WORKS_WITHIN_S = 240
_OPS = b'"logger": "tinsmith.ops"'


@dataclass
class Process:
    """A started process, leader of its own group. `name` is a worker's node name without the host."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]
    ended: bool = False
    """By a test."""

    def stop(self) -> None:
        """Stops the process as for an upgrade."""
        self.ended = True
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(_ENDS_S)

    def kill(self) -> None:
        self.ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def served(self) -> int:
        """Number of calls it has ended, by its log."""
        return self.log.read_bytes().count(_OPS)


@dataclass
class Fleet:
    """Stand-in for a stack, on which tests/chaos/script.py plays."""

    folder: Path
    base: Path
    state_url: str
    broker_url: str
    port: int = field(default_factory=free_port)
    processes: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.data_dir = self.folder / "data"
        self.url = f"http://127.0.0.1:{self.port}"
        self._settings = self.folder / "settings.toml"
        self._settings.write_text(tomli_w.dumps(self._toml()))

    def api(self, tree: Path | None) -> Process:
        """The API: one at a time, on the same port."""
        return self._start("api", tree, "gunicorn", "-c", "python:app.gunicorn_conf", "app.wsgi:application")

    def trainer(self, tree: Path | None) -> Process:
        return self._worker("trainer", tree)

    def sampler(self, tree: Path | None) -> Process:
        return self._worker("sampler", tree)

    def client(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=API_KEY)

    def redis(self) -> redis.Redis:
        return redis.Redis.from_url(self.state_url)

    def await_up(self) -> None:
        """Waits until all started processes that no test ended take calls."""
        for process in self.processes:
            await_true(lambda process=process: process.ended or self._is_up(process), f"{process.name} is up")

    def taken_by(self, name: str) -> set[str]:
        """Models and sampling requests with unfinished work that the worker of that name has begun."""
        with self.redis() as state:
            waiting = [member.decode() for member in state.zrange("tinsmith:pending", 0, -1)]
            holders = {
                one: state.hget(f"tinsmith:models:{one}", "worker") or state.hget(f"tinsmith:op:{one}", "runner")
                for one in waiting
            }
        return {one for one, holder in holders.items() if holder and holder.decode().partition("@")[0] == name}

    def kill_at_work(self, worker: Process) -> set[str]:
        """Kills a worker at work and returns its unfinished work.

        The worker is stopped first, so that it can end nothing meanwhile.
        """
        deadline = time.monotonic() + _WORKS_WITHIN_S
        while not (taken := self._stopped(worker)):
            os.killpg(worker.process.pid, signal.SIGCONT)
            assert time.monotonic() < deadline, f"{worker.name} never had anything in hand"
            time.sleep(0.02)
        worker.kill()
        return taken

    def _stopped(self, worker: Process) -> set[str]:
        os.killpg(worker.process.pid, signal.SIGSTOP)
        return self.taken_by(worker.name)

    def lost(self) -> list[str]:
        """Futures that wait although no client asks for them any more."""
        with self.redis() as state:
            futures = list(state.scan_iter("tinsmith:future:*"))
            return [key.decode() for key in futures if state.hget(key, "state") == b"pending"]

    def _worker(self, role: str, tree: Path | None) -> Process:
        name = f"{role}-{len(self.processes)}"
        return self._start(name, tree, f"workers.{role}", "--base", BASE, "--name", name)

    def _start(self, name: str, tree: Path | None, module: str, *arguments: str) -> Process:
        log = self.folder / f"{name}-{len(self.processes)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=tree,
                # One thread repeats on any machine, and leaves room for the others.
                env={**os.environ, **code_of(tree), "OMP_NUM_THREADS": "1", "TINSMITH_SETTINGS": str(self._settings)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(Process(name, log, process))
        return self.processes[-1]

    def _is_up(self, process: Process) -> bool:
        assert process.process.poll() is None, process.log.read_text()
        if process.name == "api":
            with contextlib.suppress(OSError):
                return bool(urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5).status == 200)
            return False
        with self.redis() as state:
            workers = state.zrange("tinsmith:index:workers", 0, -1)
        return any(name.startswith(f"{process.name}@".encode()) for name in workers)

    def _toml(self) -> dict[str, object]:
        return {
            "data_dir": str(self.data_dir),
            "api_keys": [hashlib.sha256(API_KEY.encode()).hexdigest()],
            "url_secret": "secret",
            "api": {"port": self.port},
            "redis": {"url": self.state_url, "broker_url": self.broker_url},
            "engine": {
                "lease_s": 2.0,
                "ring_again_s": 1.0,
                "snapshot_share": 0.05,
                "handover_dir": str(self.folder / "handover"),
            },
            "base_models": [
                {
                    "name": BASE,
                    "path": str(self.base),
                    "dtype": "float32",
                    "trainer": {"backend": "torch"},
                    # One sequence at a time: in a batch, its last bits would depend on the other sequences.
                    "sampler": {"backend": "transformers", "max_batch": 1},
                }
            ],
        }


@contextlib.contextmanager
def fleet(folder: Path, base: Path) -> Iterator[Fleet]:
    """A fleet with only the state server and the broker; all started processes are killed at the end."""
    folder.mkdir(exist_ok=True)
    with start_valkey(folder / "state") as state, start_valkey(folder / "broker", durable=False) as broker:
        found = Fleet(folder, base, state, broker)
        try:
            yield found
        finally:
            for process in found.processes:
                process.kill()
