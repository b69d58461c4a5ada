"""Downtime of a model when its owner is killed (SIGKILL): with a stand-by trainer, and with a lone trainer.

With a stand-by, the dead owner's lease must expire first. A lone trainer is restarted by the supervisor and takes its
models back at once. The tiny model makes the restore short, so the figure is the service's own time. All settings
are the defaults.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
import tinker

from app import settings as settings_module
from app.settings import BaseModelSettings, TrainerSettings
from app.stores.redis import keys
from app.stores.redis.client import connect
from ops.bench import batches, client_batches, models, servers, side
from ops.bench.report import Goal, Outcome
from ops.bench.timing import summary

_ROUNDS = 3
_STEPS_BEFORE, _STEPS_AFTER = 20, 200
_PATIENCE_S = 180.0
_THREADS = 1
# The lease of 15 s and two rounds of the redispatch task; a start of Python, torch and the backend.
_STANDBY_GOAL_S, _RESTART_GOAL_S = 20.0, 15.0


def run(folder: Path, rounds: int = _ROUNDS) -> Outcome:
    base = models.tiny(folder / "base")
    with side.threads(_THREADS):
        figures: dict[str, Any] = {
            name: _figures(_measure(folder / name, _trainers(base, count), rounds))
            for name, count in (("standby", 2), ("restart", 1))
        }
    goals = (
        Goal("stand-by: next Op applied, p50", figures["standby"]["total_s"]["p50"], "at_most", _STANDBY_GOAL_S, "s"),
        Goal("restart: next Op applied, p50", figures["restart"]["total_s"]["p50"], "at_most", _RESTART_GOAL_S, "s"),
    )
    return Outcome({"rounds": rounds, **figures}, goals)


def _trainers(base: BaseModelSettings, count: int) -> BaseModelSettings:
    return base.model_copy(update={"trainer": TrainerSettings(backend="torch", count=count)})


def _figures(rounds: list[dict[str, float]]) -> dict[str, Any]:
    return {name: summary([found[name] for found in rounds]) for name in rounds[0]}


def _measure(folder: Path, base: BaseModelSettings, rounds: int) -> list[dict[str, float]]:
    folder.mkdir()
    with (
        servers.running_stack(folder, base) as stack,
        tinker.ServiceClient(base_url=stack.url, api_key=servers.API_KEY) as service,
    ):
        settings = settings_module.load(stack.settings_file)
        with connect(settings.redis.url) as client:
            return [_round(service, base.name, _Model(client, stack.data_dir / "logs")) for _ in range(rounds)]


def _round(service: tinker.ServiceClient, base: str, model: _Model) -> dict[str, float]:
    """Seconds of each part, on a separate model with some steps done and many to come."""
    client = service.create_lora_training_client(base_model=base, rank=8).result()
    data, adam = client_batches.datums(batches.random_tokens(4, 12, models.TINY_VOCAB_SIZE)), client_batches.adam()

    def steps(count: int) -> list[Any]:
        """Submits `count` steps at once and returns their futures."""
        return [call() for _ in range(count) for call in (backward, step)]

    def backward() -> Any:
        return client.forward_backward(data, batches.LOSS)

    def step() -> Any:
        return client.optim_step(adam)

    for future in steps(_STEPS_BEFORE):
        future.result()
    model.id = client.model_id
    pending = steps(_STEPS_AFTER)
    pending[0].result()
    found = model.kill_owner()
    for future in pending:
        future.result()
    return found


@dataclass
class _Model:
    """A model's record in Redis, and the process that owns it."""

    client: redis.Redis
    logs: Path
    id: str = ""

    def kill_owner(self) -> dict[str, float]:
        worker = _text(self.client.get(keys.lease(self.id)))
        epoch, _ = self._head()
        os.kill(_pid(self.logs / f"{worker.partition('@')[0]}.log"), signal.SIGKILL)
        killed = time.perf_counter()
        _, applied = self._head()
        owned = self._when(lambda: self._head()[0] > epoch)
        done = self._when(lambda: self._head()[1] > applied)
        replayed = applied - int(self._fields("snapshot_seq")[0])
        return {
            "total_s": done - killed,
            "until_owned_s": owned - killed,
            "restore_replay_and_first_op_s": done - owned,
            "ops_behind_snapshot": float(replayed),
        }

    def _when(self, condition: Callable[[], bool]) -> float:
        deadline = time.perf_counter() + _PATIENCE_S
        while not condition():
            if time.perf_counter() > deadline:
                raise TimeoutError(f"{self.id} made no progress for {_PATIENCE_S:.0f} s; see the trainers' logs")
            time.sleep(0.002)
        return time.perf_counter()

    def _head(self) -> tuple[int, int]:
        """Returns (epoch, applied)."""
        epoch, applied = self._fields("epoch", "applied")
        return int(epoch), int(applied)

    def _fields(self, *names: str) -> list[Any]:
        return list(self.client.hmget(keys.model(self.id), list(names)))


def _text(stored: Any) -> str:
    return bytes(stored or b"").decode()


def _pid(log: Path) -> int:
    """Pid of the process that writes `log`. Its command line does not help: Celery overwrites it."""
    return next(int(process.name) for process in Path("/proc").glob("[0-9]*") if _writes(process, log))


def _writes(process: Path, log: Path) -> bool:
    with suppress(OSError):
        return (process / "fd" / "1").readlink() == log
    return False
