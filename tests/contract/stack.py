"""`tinsmith up` as a user starts it: real processes and real parts, on a tiny random base model."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import redis
import tinker

from app import settings
from app.domain.records import Worker
from app.stores.redis import keys
from app.stores.redis.client import connect
from app.stores.redis.records import RedisRecords, load

BASE = "tests/tiny-qwen3"
API_KEY = "tml-contract-tests"
_READY = re.compile(r"^ready (http://\S+)")
_START_S = 600


@dataclass
class Stack:
    """A running stack.

    `trainer`, `sampler`, `full` and `full_sampler` are TOML lines for the base model's sections; `full` and
    `full_sampler` exist only if given. `name` is the base model's name, and `base` are further lines of its own.
    `wrapper` is a command that runs the command behind it as the same process. `api_key` is that of the clients.
    `program` is the module that takes the command line; every process computes with `threads` threads. `tree` is the
    folder with the code, if it is not this one. `cwd` is the folder that the user is in, if it is not that with the
    code, and `environ` has further variables of the user.
    """

    data_dir: Path
    base_path: Path
    port: int
    trainer: str = ""
    sampler: str = ""
    extra: str = ""
    program: str = "app.cli"
    threads: int = 2
    full: str = ""
    full_sampler: str = ""
    tree: Path | None = None
    cwd: Path | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    name: str = BASE
    base: str = ""
    wrapper: tuple[str, ...] = ()
    api_key: str = API_KEY
    process: subprocess.Popen[str] | None = None
    url: str = ""
    output: list[str] = field(default_factory=list)

    def start(self) -> None:
        config = self.data_dir.parent / f"{self.data_dir.name}.toml"
        config.write_text(self._toml())
        # As `tinsmith`, Python with -P does not import from the folder that the user is in.
        python = [sys.executable, "-P"] if self.cwd else [sys.executable]
        command = [*python, "-m", self.program, "up", "--config", str(config), "--data-dir", str(self.data_dir)]
        self.process = subprocess.Popen(
            [*self.wrapper, *command, "--port", str(self.port), "--api-key", API_KEY],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.cwd or self.tree,
            env={**os.environ, **code_of(self.tree), "OMP_NUM_THREADS": str(self.threads), **self.environ},
        )
        self.url = self._await_ready()

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(240)

    def client(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=self.api_key)

    def settings(self) -> settings.Settings:
        return settings.load(self.data_dir / "run" / "settings.toml")

    def redis(self) -> redis.Redis:
        return connect(self.settings().redis.url)

    def workers(self) -> list[Worker]:
        with self.redis() as client:
            return [load(Worker, fields) for _, fields in RedisRecords(client).list(Worker.namespace)]

    def applied(self, model_id: str) -> int:
        """The seq_id of the model's last applied call."""
        with self.redis() as client:
            return int(client.hget(keys.model(model_id), "applied"))

    def _toml(self) -> str:
        return f"""
{self.extra}
[[base_models]]
name = "{self.name}"
path = "{self.base_path}"
dtype = "float32"
{self.base}
[base_models.trainer]
{self.trainer}
[base_models.sampler]
{self.sampler}
{"[base_models.full]" if self.full else ""}
{self.full}
{"[base_models.full_sampler]" if self.full_sampler else ""}
{self.full_sampler}
"""

    def _await_ready(self) -> str:
        assert self.process is not None and self.process.stdout is not None
        timer = threading.Timer(_START_S, self.process.kill)
        timer.start()
        for line in self.process.stdout:
            self.output.append(line)
            if match := _READY.match(line):
                timer.cancel()
                threading.Thread(target=self._drain, daemon=True).start()
                return match[1]
        timer.cancel()
        raise RuntimeError("the stack did not start:\n" + "".join(self.output))

    def _drain(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        self.output.extend(self.process.stdout)


def code_of(tree: Path | None) -> dict[str, str]:
    """Environment in which a Python process and its children take `app` and `workers` from the folder."""
    return {} if tree is None else {"PYTHONPATH": str(tree)}


def download_model(training: tinker.TrainingClient, stack: Stack, folder: Path, name: str = "downloaded") -> Path:
    """Downloads the current model into the folder."""
    path = training.save_weights_external(name).result().path
    rest = tinker.RestClient(base_url=stack.url, api_key=API_KEY)
    for file, url in rest.get_external_weights_urls(path).result().urls.items():
        with urllib.request.urlopen(url) as answer:
            (folder / file).write_bytes(answer.read())
    return folder


@contextlib.contextmanager
def running(stack: Stack) -> Iterator[Stack]:
    try:
        stack.start()
        yield stack
    finally:
        if stack.process is not None and stack.process.poll() is None:
            stack.stop()
