"""A sampler in turns loads, evicts and puts to sleep an engine at the right time. The engine records its calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.errors import ServerOpError
from tests.unit.workers.conftest import await_true
from workers.backends.sampling.base import Aborted, RequestHandle
from workers.process.fair_queue import FairQueue
from workers.process.gpu_turns import GpuTurns, SamplerInTurns
from workers.sample.adapters import Adapters, AdapterScheduler

_FOREVER_S = 60.0


class Engine:
    """Records the calls of an engine."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self.calls.append((name, *args))


@dataclass
class Files:
    """The files of every adapter are in one folder."""

    folder: Path

    @contextmanager
    def use(self, prefix: str) -> Iterator[Path]:
        yield self.folder


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[GpuTurns]:
    """The turns of another process on the same device."""
    turns = GpuTurns(tmp_path / "turns", lambda: None, lambda: None, 60.0, 0.0)
    yield turns
    turns.close()


def test_a_request_that_is_cancelled_before_its_adapter_is_loaded_ends_at_once(
    elsewhere: GpuTurns, tmp_path: Path
) -> None:
    engine: Any = Engine()
    sampler = SamplerInTurns(engine, tmp_path / "turns", 60.0, 0.0)
    adapters = Adapters(sampler, Files(tmp_path), AdapterScheduler(1, FairQueue()), 1, sampler.turns.use)
    handle = RequestHandle()

    def request() -> None:
        with adapters.use("adapter", "me", handle):
            raise ServerOpError("it has its turn")

    with ThreadPoolExecutor(1) as pool, elsewhere.use():
        running = pool.submit(request)
        await_true(lambda: sampler.turns._waiting, "the load waits for its turn")
        handle.abort()
        with pytest.raises(Aborted):
            running.result(_FOREVER_S)
    assert ("load", "adapter", tmp_path) not in engine.calls
    assert not adapters._loading
    assert not adapters._in_use
    sampler.turns.close()


def test_an_adapter_is_evicted_and_loaded_only_by_an_engine_that_is_awake(tmp_path: Path, elsewhere: GpuTurns) -> None:
    engine: Any = Engine()
    sampler = SamplerInTurns(engine, tmp_path / "turns", 60.0, 0.0)
    sampler.load("old", tmp_path)
    with elsewhere.use():
        sampler.evict("old")
    sampler.load("new", tmp_path)
    assert engine.calls == [
        ("wake",),
        ("load", "old", tmp_path),
        ("sleep",),
        ("wake",),
        ("evict", "old"),
        ("load", "new", tmp_path),
    ]
    sampler.close()
    assert engine.calls[-1] == ("close",)


def test_an_engine_that_did_not_start_is_not_put_to_sleep(tmp_path: Path, elsewhere: GpuTurns) -> None:
    engine: Any = Engine()
    engine.open, engine.healthy = lambda: int("no"), lambda: True
    sampler = SamplerInTurns(engine, tmp_path / "turns", 60.0, 0.0)
    with pytest.raises(ValueError, match="no"):
        sampler.open()
    assert not sampler.healthy()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(_use, elsewhere)
        await_true(lambda: sampler.turns._is_wanted(), "another process waits")
        os.close(sampler.turns._turn)  # as the kernel does when the process ends
        running.result(_FOREVER_S)
    assert engine.calls == [("wake",)]


def _use(turns: GpuTurns) -> None:
    with turns.use():
        pass
