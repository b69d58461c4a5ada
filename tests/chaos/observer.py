"""Outside view of the running work: journal heads in Redis, processes by their command lines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TypeVar

import psutil

from app.domain.records import Model, Worker
from app.stores.redis import keys
from app.stores.redis.records import RedisRecords, load
from tests.chaos.patience import patiently
from tests.contract.stack import Stack
from tests.warm_ranks import rank_of

T = TypeVar("T")

_REFUSED = b'"commit refused"'


@dataclass(frozen=True, slots=True)
class Running:
    """An Op that the owner of its model has taken and not committed. `worker` is "node/boot"."""

    model_id: str
    seq: int
    kind: str
    attempts: int
    worker: str

    @property
    def node(self) -> str:
        """Node name as in a command line: without Celery's host part."""
        return self.worker.partition("@")[0]


@dataclass(frozen=True, slots=True)
class Heads:
    """(epoch, applied) of every model. Each epoch except a model's first is a change of owner."""

    models: dict[str, tuple[int, int]]

    @property
    def applied(self) -> int:
        return sum(applied + 1 for _, applied in self.models.values())

    def applied_since(self, before: Heads) -> int:
        """Ops applied since `before` to models that still exist."""
        return sum(applied - before.models.get(model, (0, -1))[1] for model, (_, applied) in self.models.items())

    @property
    def changes(self) -> int:
        return sum(max(0, epoch - 1) for epoch, _ in self.models.values())


class Observer:
    """Reads the state of the stack. Every read waits until Redis is back, if it is down."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._redis = stack.redis()

    def heads(self) -> Heads:
        """Heads of all models."""
        return Heads({model: (epoch, applied) for model, epoch, applied in patiently(self._read_heads)})

    def running(self) -> list[Running]:
        """Ops that are running now. Some of their workers may be dead."""
        return patiently(lambda: list(self._running()))

    def begun(self) -> list[Running]:
        """Ops by each worker that began and did not commit them: its death may count as an attempt, whoever owns the
        model now."""
        return patiently(lambda: list(self._begun()))

    def holders(self) -> set[str]:
        """ "node/boot" of every worker that owns a model."""
        return patiently(lambda: {worker for model, _, _ in self._read_heads() if (worker := self._holder(model))})

    def waiting(self) -> int:
        """Models and samples with unfinished work."""
        return patiently(lambda: int(self._redis.zcard(keys.PENDING)))

    def processes(self, name: str) -> list[psutil.Process]:
        """All processes of the supervisor's child `name`, parents first."""
        assert self._stack.process is not None
        found = psutil.Process(self._stack.process.pid).children(recursive=True)
        return [process for process in found if writes(process, self.log(name))]

    def log(self, name: str) -> Path:
        """Log file of the supervisor's child `name`."""
        return self._stack.data_dir / "logs" / f"{name}.log"

    def refused_commits(self, name: str, since: int = 0) -> int:
        """Number of refused commits that the worker of that name has logged, after its log's first `since` bytes."""
        with self.log(name).open("rb") as log:
            log.seek(since)
            return log.read().count(_REFUSED)

    def ranks(self, name: str) -> list[psutil.Process]:
        """Processes of the worker of that name, rank 0 first; without the launcher."""
        found = [(rank, process) for process in self.processes(name) if (rank := _rank(process)) is not None]
        return [process for _, process in sorted(found, key=lambda pair: pair[0])]

    def node(self, name: str) -> psutil.Process | None:
        """The process that takes a worker's Ops, if it runs."""
        return next(iter(self.ranks(name)), None)

    def trainers(self) -> dict[str, psutil.Process]:
        """Trainers that take Ops: alive, started up and not stopped."""
        return patiently(lambda: dict(self._trainers()))

    def _trainers(self) -> Iterator[tuple[str, psutil.Process]]:
        for name, stored in RedisRecords(self._redis).list(Worker.namespace):
            worker = load(Worker, stored)
            process = self.node(name.partition("@")[0]) if worker.role == "trainer" else None
            with suppress(psutil.NoSuchProcess):
                # A record outlives its process by seconds, so it may belong to the previous process.
                if process and worker.started > process.create_time() and process.status() != psutil.STATUS_STOPPED:
                    yield name.partition("@")[0], process

    def _read_heads(self) -> list[tuple[str, int, int]]:
        """Reads the heads from the models' records, which contain their journals' heads."""
        models = RedisRecords(self._redis).list(Model.namespace)
        return [(model, int(head["epoch"]), int(head["applied"])) for model, head in models]

    def _running(self) -> Iterator[Running]:
        for waiting in self._redis.zrange(keys.PENDING, 0, -1):
            model = waiting.decode()
            applied, holder = self._redis.hget(keys.model(model), "applied"), self._holder(model)
            if applied is None or not holder:
                continue
            seq = int(applied) + 1
            op = self._redis.hmget(keys.op(f"{model}:{seq}"), "kind", "attempts", "runner")
            if op[2] is not None and op[2].decode() == holder:
                yield Running(model, seq, op[0].decode(), int(op[1]), holder)

    def _begun(self) -> Iterator[Running]:
        for model, _, applied in self._read_heads():
            for seq in count(applied + 1):
                op = self._redis.hmget(keys.op(f"{model}:{seq}"), "kind", "attempts", "runner", "former")
                if op[0] is None:
                    break
                for worker in {(op[2] or b"").decode(), *json.loads(op[3] or "{}")} - {""}:
                    yield Running(model, seq, op[0].decode(), int(op[1]), worker)

    def _holder(self, model: str) -> str:
        return (self._redis.get(keys.lease(model)) or b"").decode()


def await_true(what: str, condition: Callable[[], T], seconds: float = 300.0) -> T:
    """Returns the first true answer of `condition`. Raises Stalled."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise Stalled(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.01)
    return found


class Stalled(AssertionError):
    """An expected event did not happen in time."""


def writes(process: psutil.Process, log: Path) -> bool:
    """Tells if the process writes to `log`: Celery, gunicorn and Valkey overwrite their command lines."""
    with suppress(OSError):
        return Path(f"/proc/{process.pid}/fd/1").readlink() == log
    return False


def _rank(process: psutil.Process) -> int | None:
    """Rank of a worker's process; None for the launcher of several ranks, and for a process that has just ended."""
    with suppress(psutil.NoSuchProcess):
        return rank_of(process)
    return None
