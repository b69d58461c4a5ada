"""An orderly stop hands back what runs: it costs no attempt, however often it happens."""

from __future__ import annotations

import inspect
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import redis
import tomli_w

from app.domain import ops
from app.domain.records import Model, Sampler, Worker
from app.domain.sampling import SampleRequest
from app.settings import SETTINGS_VARIABLE, EngineSettings
from app.stack.supervisor import Supervisor
from app.stores.redis import keys
from app.stores.redis.client import connect
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords, dump, load
from tests.property.vector_backend import backward
from tests.property.world import BASE, CREATE, MODEL
from tests.servers import start_valkey
from workers.process import orderly_stop

SAMPLER = "session:sample:0"
# One more than the attempts that any call has.
STOPS = 4


class Workers:
    """Workers of one role, one after the other, over a state server."""

    def __init__(self, url: str, client: redis.Redis, folder: Path) -> None:
        self.client, self.folder = client, folder
        self.oplog = RedisOpLog(client, EngineSettings())
        self._settings = folder / "settings.toml"
        engine = {"lease_s": 2.0, "ring_again_s": 0.2, "handover_dir": str(folder / "handover")}
        base = {"name": BASE, "path": "x", "trainer": {"backend": "torch"}}
        self._texts = {"data_dir": str(folder), "redis": {"url": url}, "engine": engine, "base_models": [base]}
        self._settings.write_text(tomli_w.dumps(self._texts))

    def use_broker(self, url: str) -> None:
        self._settings.write_text(tomli_w.dumps({**self._texts, "redis": {**self._texts["redis"], "broker_url": url}}))

    @contextmanager
    def running(self, role: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        environment = {**os.environ, SETTINGS_VARIABLE: str(self._settings)}
        module = "tests.processes.workers.process.slow_worker"
        launcher = ["-m", "workers.process.torchrun", "--nproc-per-node", "2"] if "ranks" in options else []
        command = [sys.executable, *launcher, "-m", module, role, str(self.folder), *options]
        process = subprocess.Popen(command, env=environment)
        try:
            yield process
        finally:
            ranks = psutil.Process(process.pid).children() if process.poll() is None else []
            for each in (process, *ranks):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()

    def stop_during_work(
        self, role: str, *options: str, stop: Callable[[subprocess.Popen[bytes]], None] = subprocess.Popen.terminate
    ) -> int:
        """Starts a worker, and stops it, by default as a supervisor does, once it works. Returns its exit code.

        Its work would take much longer than it has here to end. The last test has the time that a supervisor gives.
        """
        begun = self.folder / "begun"
        begun.unlink(missing_ok=True)
        with self.running(role, *options) as process:
            self.until(begun.exists, process)
            stop(process)
            try:
                return process.wait(timeout=240)
            except subprocess.TimeoutExpired:
                process.kill()
                return process.wait()

    def admit_pass(self) -> str:
        self.oplog.create_model(MODEL, dump(Model("me", "session", BASE, 0.0)))
        for seq, op in enumerate((CREATE, backward(1))):
            payload = ops.encode(op)
            self.oplog.admit(MODEL, seq, op.kind, payload, ops.digest(payload))
        return f"{MODEL}:1"

    def admit_sample(self) -> str:
        RedisRecords(self.client).put_new(Sampler.namespace, SAMPLER, dump(Sampler("me", "session", BASE, 0.0)))
        payload = ops.encode(SampleRequest(np.array([5, 6, 7], np.int32), num_samples=1, max_tokens=4, seed=3))
        request = f"{SAMPLER}:0"
        self.oplog.admit_sample(request, SAMPLER, "me", f"sample.{BASE}", payload, ops.digest(payload))
        return request

    def finish(self, role: str, request_id: str) -> None:
        (self.folder / "go").touch()
        with self.running(role) as process:
            self.until(lambda: self.oplog.outcome(request_id) is not None, process)

    def until(self, condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 240
        while not condition():
            assert process.poll() is None, f"the worker ended with {process.returncode}"
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with start_valkey(tmp_path / "valkey") as url, connect(url) as client:
        yield Workers(url, client, tmp_path)


def test_stops_during_a_long_pass_cost_no_attempt(workers: Workers):
    request = workers.admit_pass()
    for _ in range(STOPS):
        assert workers.stop_during_work("trainer") == 0, "it ended by itself"
        assert workers.client.hmget(keys.op(request), "runner", "attempts") == [None, b"0"]
        assert not workers.client.exists(keys.lease(MODEL)), "another trainer can go on at once"
    workers.finish("trainer", request)
    result = workers.oplog.outcome(request)
    assert result is not None and not result.failed


def test_a_stop_of_several_ranks_costs_no_attempt(workers: Workers):
    request = workers.admit_pass()
    workers.stop_during_work("trainer", "ranks")
    assert workers.client.hmget(keys.op(request), "runner", "attempts") == [None, b"0"]
    assert not workers.client.exists(keys.lease(MODEL)), "another trainer can go on at once"


def test_the_death_of_another_rank_is_an_attempt_although_the_pass_does_not_notice_it(workers: Workers):
    """The launcher then stops this rank as a supervisor does."""
    request = workers.admit_pass()
    workers.stop_during_work("trainer", "ranks", stop=kill_rank_1)
    assert not workers.client.exists(keys.lease(MODEL)), "another trainer can go on at once"
    workers.finish("trainer", request)
    assert workers.client.hget(keys.op(request), "attempts") == b"1"


def kill_rank_1(launcher: subprocess.Popen[bytes]) -> None:
    [follower] = (each for each in psutil.Process(launcher.pid).children() if each.environ().get("RANK") == "1")
    follower.kill()


def test_stops_during_a_long_sample_cost_no_attempt(workers: Workers):
    request = workers.admit_sample()
    for _ in range(STOPS):
        assert workers.stop_during_work("sampler") == 0
        assert workers.client.hmget(keys.op(request), "runner", "attempts") == [None, b"0"]
    workers.finish("sampler", request)
    result = workers.oplog.outcome(request)
    assert result is not None and not result.failed


def test_what_runs_is_handed_back_before_a_supervisor_kills():
    grace_s = inspect.signature(Supervisor).parameters["grace_s"].default
    assert grace_s >= orderly_stop._WITHIN_S + 2


def test_others_see_at_once_that_a_worker_is_asked_to_end(workers: Workers):
    """It finishes what it runs first, and takes no more."""

    def are(healthy: bool) -> bool:
        found = [load(Worker, stored) for _, stored in RedisRecords(workers.client).list(Worker.namespace)]
        return [worker.healthy for worker in found] == [healthy]

    workers.admit_sample()
    with workers.running("sampler", "long") as process:
        workers.until((workers.folder / "begun").exists, process)
        workers.until(lambda: are(healthy=True), process)
        process.send_signal(signal.SIGTERM)
        workers.until(lambda: are(healthy=False), process)


@pytest.mark.parametrize("role", ["trainer", "sampler"])
def test_a_worker_that_is_asked_to_end_again_and_again_while_it_becomes_ready_ends(workers: Workers, role: str):
    with workers.running(role, "interrupted") as process:
        assert process.wait(timeout=240) == 0
    assert (workers.folder / "begun").exists(), "the signals came while it became ready"
    assert not list(RedisRecords(workers.client).list(Worker.namespace)), "others know that it has ended"


def test_a_worker_whose_broker_does_not_answer_ends_too(workers: Workers):
    with socket.create_server(("127.0.0.1", 0)) as broker:
        workers.use_broker(f"redis://127.0.0.1:{broker.getsockname()[1]}/0")
        with workers.running("trainer", "patient") as process:
            connection, _ = broker.accept()
            with connection:
                connection.recv(1)
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=240) == 0
