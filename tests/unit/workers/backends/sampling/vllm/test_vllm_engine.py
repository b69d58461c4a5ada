"""The thread that owns vLLM's engine, with a stand-in engine: its answers to calls while it shuts down."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import ServerOpError
from workers.backends.sampling.vllm import engine as vllm_engine
from workers.backends.sampling.vllm.engine import EngineThread

SHUTTING_DOWN = "the worker is shutting down"


class Engine:
    """Engine that reports its death to every pending call, as vLLM's does."""

    errored = False
    output_processor = SimpleNamespace(process_outputs=print)

    def __init__(self) -> None:
        self.called = threading.Event()
        self.ending = threading.Event()
        self.goes_on = threading.Event()

    async def generate(self) -> None:
        self.called.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RuntimeError("EngineDeadError") from None

    async def fail(self) -> None:
        raise RuntimeError("no such prompt")

    def shutdown(self) -> None:
        self.ending.set()
        assert self.goes_on.wait(30)


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineThread]:
    async def start(_: dict[str, Any]) -> Engine:
        return Engine()

    monkeypatch.setattr(vllm_engine, "_start", start)
    yield EngineThread({"model": "m"})


def test_whatever_a_call_meets_while_the_engine_is_stopped_it_says_that_the_worker_shuts_down(thread: EngineThread):
    engine: Engine = thread.engine
    with ThreadPoolExecutor(2) as pool:
        before = pool.submit(thread.call, lambda engine: engine.generate())
        assert engine.called.wait(30)
        assert thread.alive
        stopped = pool.submit(thread.stop)
        assert engine.ending.wait(30)
        assert not thread.alive, "or what it fails would be a result"
        with pytest.raises(ServerOpError, match=SHUTTING_DOWN):
            thread.call(lambda engine: engine.fail())
        engine.goes_on.set()
        stopped.result(30)
        with pytest.raises(ServerOpError, match=SHUTTING_DOWN):
            before.result(30)


def test_a_failure_of_an_engine_that_goes_on_is_its_own(thread: EngineThread):
    with pytest.raises(RuntimeError, match="no such prompt"):
        thread.call(lambda engine: engine.fail())
    thread.engine.goes_on.set()
    thread.stop()
