"""A real trainer process, with Celery or dispatched through a pipe: forked in milliseconds from a process with torch.

The forkserver imports torch and starts no thread, so that its forks may compute; each worker checks that.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NoReturn

import psutil

from app import dispatch
from app.errors import Requeue
from app.settings import SETTINGS_VARIABLE, Settings
from tests import forkserver, warm_workers
from tests.faults.injection import Call, Fault, FaultInjector
from workers.backends.training.backends import create
from workers.process.liveness import worker_name
from workers.process.parts import Parts, Serving
from workers.process.runtime import Runtime
from workers.train.assembly import assemble_trainer

Answer = tuple[Literal["done", "failed", "unknown", "not now", "error"], str]
_WITHIN_S = 240
_context = forkserver.context()


def start_with_celery(settings: Path, arguments: Sequence[str]) -> BaseProcess:
    """A trainer that is started with these arguments, as a process of multiprocessing."""
    command = [sys.executable, "-m", "workers.trainer", *arguments]
    process = _context.Process(target=_become, args=(command, {**os.environ, SETTINGS_VARIABLE: str(settings)}))
    process.start()
    return process


class Died(Exception):
    """The worker ended without an answer; `status` as of multiprocessing (-9 for SIGKILL)."""

    def __init__(self, status: int | None) -> None:
        super().__init__(f"the worker ended with status {status}")
        self.status = status


class WorkerProcess:
    """One trainer of the first base model in `settings`, and the faults that are to hit it."""

    def __init__(self, settings: Settings, node: str, *faults: Fault) -> None:
        self.node = node
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(theirs, settings, node, faults), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def send(self, request_id: str, model_id: str, kind: str) -> None:
        """Dispatches a request and returns at once."""
        self._send(("dispatch", request_id, model_id, kind))

    def answer(self, within_s: float = _WITHIN_S) -> Any:
        """Returns the outcome of the last message. Raises Died."""
        try:
            assert self._pipe.poll(within_s), f"the worker {self.node} gave no answer in {within_s} s"
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self._death() from None

    def calls(self) -> list[Call]:
        self._send(("calls",))
        return self.answer()

    def close(self) -> None:
        """Closes in order, like a worker that is asked to stop. Raises Died."""
        self._send(("close",))
        self.answer()
        self._process.join(_WITHIN_S)

    @property
    def stopped(self) -> bool:
        """Tells if all threads of the worker are stopped (SIGSTOP)."""
        return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED

    @property
    def answered(self) -> bool:
        return self._pipe.poll()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def _send(self, message: tuple[str, ...]) -> None:
        try:
            self._pipe.send(message)
        except OSError:
            raise self._death() from None

    def _death(self) -> Died:
        self._process.join()
        assert self._process.exitcode != 1, f"the worker {self.node} ended with an exception of its own"
        return Died(self._process.exitcode)


def _become(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    _assert_alone()
    os.environ.update(environ)
    warm_workers.run_module(command, " ".join(command))


def _assert_alone() -> None:
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, f"forked beside {len(threads) - 1} other threads"


def _serve(pipe: Connection, settings: Settings, node: str, faults: tuple[Fault, ...]) -> None:
    _assert_alone()
    injector = FaultInjector(faults)
    worker = _trainer(settings, node, injector)
    while True:
        match pipe.recv():
            case ("dispatch", request_id, model_id, kind):
                pipe.send(_handle(worker, request_id, model_id, kind))
            case ("calls",):
                pipe.send(injector.calls)
            case _:
                worker.close()
                return pipe.send("closed")


def _trainer(settings: Settings, node: str, injector: FaultInjector) -> Runtime:
    parts = Parts.of(settings, dispatch.celery_app(settings), worker_name(node))
    watched = replace(
        parts,
        oplog=injector.over("oplog", parts.oplog),
        records=injector.over("records", parts.records),
        store=injector.over("store", parts.store),
    )
    base = settings.base_models[0]
    backend = injector.over("backend", create(base))
    serving = Serving(base, backend, backend.open(), dispatch.train_queue(base.name))
    return assemble_trainer(watched, serving).runtime()


def _handle(worker: Runtime, request_id: str, model_id: str, kind: str) -> Answer:
    """Handles a dispatch as the Celery task does: every failure outside the Op causes a redispatch."""
    try:
        result = worker.handle(request_id, model_id, kind, worker.queue)
    except Requeue as reason:
        return "not now", str(reason)
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"
    if result is None:
        return "unknown", ""
    return "failed" if result.failed else "done", result.body.decode(errors="replace")
