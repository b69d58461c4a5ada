"""The API and a trainer as in production, each a separate process: gunicorn, and a Celery worker, which is forked."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from multiprocessing.process import BaseProcess
from pathlib import Path

import redis
import tinker
import tomli_w

from app.domain.records import Worker
from app.settings import SETTINGS_VARIABLE, hash_key
from app.stores.redis.client import connect
from app.stores.redis.records import RedisRecords, load
from tests.faults.worker_process import start_with_celery
from tests.faults.world import await_true
from tests.servers import free_port

BASE = "tests/tiny-qwen3"
_KEY = "tml-faults"


class Stack:
    """A running API and trainer.

    `state` and `broker` are the addresses that the processes use; `direct` is the state server itself. `store` are the
    object store's settings, if it is not a folder. `engine` are further settings of the engine.
    """

    def __init__(
        self,
        folder: Path,
        base_path: Path,
        state: str,
        broker: str,
        direct: str,
        store: dict[str, str] | None = None,
        lease_s: float = 3.0,
        **engine: int,
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.client = connect(direct)
        self._trainers: list[BaseProcess] = []
        self._settings = folder / "settings.toml"
        folder.mkdir()
        base = {"name": BASE, "path": str(base_path), "dtype": "float32", "trainer": {"backend": "torch"}}
        self._settings.write_text(
            tomli_w.dumps(
                {
                    "data_dir": str(folder / "data"),
                    "api_keys": [hash_key(_KEY)],
                    "url_secret": "secret",
                    "api": {"port": port},
                    "redis": {"url": state, "broker_url": broker},
                    "store": store or {},
                    "engine": {"lease_s": lease_s, "ring_again_s": 1.0, **engine},
                    "base_models": [base],
                }
            )
        )
        api = [sys.executable, "-m", "gunicorn", "-c", "python:app.gunicorn_conf", "app.wsgi:application"]
        self._api = subprocess.Popen(api, env={**os.environ, SETTINGS_VARIABLE: str(self._settings)})
        self.trainer = self.start_trainer()
        await_true(self._ready, "the stack is up")

    def start_trainer(self) -> BaseProcess:
        self._trainers.append(start_with_celery(self._settings, ["--base", BASE, "--name", "trainer"]))
        return self._trainers[-1]

    def sdk(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=_KEY)

    def stop(self) -> None:
        for trainer in self._trainers:
            trainer.kill()
            trainer.join()
        self._api.kill()
        self._api.wait()
        self.client.close()

    def _ready(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=2)
            roles = {load(Worker, fields).role for _, fields in RedisRecords(self.client).list(Worker.namespace)}
        except (OSError, redis.RedisError):
            return False
        return "trainer" in roles
