"""An engine that is slow to evict an adapter delays only the request that ends, and those of that adapter."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from app.errors import ServerOpError, Unavailable
from workers.backends.sampling.base import RequestHandle
from workers.process.fair_queue import FairQueue
from workers.sample.adapters import Adapters, AdapterScheduler

WITHIN_S = 60.0


class SlowEngine:
    """Its evictions wait for `busy`. As in vLLM's adapter, a loaded id stays as it is."""

    def __init__(self) -> None:
        self.evicting, self.busy = threading.Event(), threading.Event()
        self.here: set[str] = set()
        self.events: list[str] = []
        self.room = 99
        self.loading: Callable[[str], object] = lambda _: None

    def load(self, adapter_id: str, folder: Path) -> None:
        assert sys.exception() is None, "the error of an earlier load keeps the tensors of that load"
        if adapter_id not in self.here:
            self.loading(adapter_id)
            if len(self.here) >= self.room:
                raise Unavailable("memory is short")
            self.here.add(adapter_id)
            self.events.append(f"load {adapter_id}")

    def evict(self, adapter_id: str) -> None:
        self.evicting.set()
        assert self.busy.wait(WITHIN_S)
        self.here.remove(adapter_id)
        self.events.append(f"evict {adapter_id}")


class Files:
    """The adapters' files, which are all here; counts their holders."""

    in_place = False

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()

    @contextmanager
    def use(self, prefix: str) -> Iterator[Path]:
        try:
            yield self.acquire(prefix)
        finally:
            self.release(prefix)

    def acquire(self, prefix: str) -> Path:
        self.held[prefix] += 1
        return Path(prefix)

    def release(self, prefix: str) -> None:
        self.held[prefix] -= 1


class World:
    """One adapter stays loaded and three run at a time. The engine is about to evict "a", as "b" has come."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.engine, self.files = SlowEngine(), Files()
        scheduler = AdapterScheduler(3, FairQueue())
        self.adapters = Adapters(cast(Any, self.engine), cast(Any, self.files), scheduler, 1, lambda _: nullcontext())
        self.use("a")
        self.ending = pool.submit(self.use, "b")
        assert self.engine.evicting.wait(WITHIN_S)

    def use(self, prefix: str) -> bool:
        """True if the adapter is loaded for as long as its request."""
        with self.adapters.use(prefix, "me", RequestHandle()) as adapter_id:
            return adapter_id in self.engine.here


@pytest.fixture
def world() -> Iterator[World]:
    with ThreadPoolExecutor() as pool:
        world = World(pool)
        yield world
        world.engine.busy.set()


def test_a_request_for_another_adapter_begins_while_the_engine_evicts_one(world: World) -> None:
    with ThreadPoolExecutor() as pool, world.adapters.use("b", "me", RequestHandle()):
        begun = threading.Event()

        def begin() -> None:
            with world.adapters.use("c", "me", RequestHandle()):
                begun.set()

        ended = pool.submit(begin)
        try:
            assert begun.wait(WITHIN_S), "it waits for the eviction"
        finally:
            world.engine.busy.set()
        ended.result(WITHIN_S)
    assert world.ending.result(WITHIN_S)
    assert world.engine.events[:3] == ["load a", "load b", "load c"]
    assert "evict a" in world.engine.events


def test_an_adapter_that_is_wanted_again_while_it_is_evicted_is_loaded_again(world: World) -> None:
    with ThreadPoolExecutor() as pool:
        back = pool.submit(world.use, "a")
        with pytest.raises(TimeoutError):
            back.result(0.2)  # else it would sample with the adapter that goes
        world.engine.busy.set()
        assert back.result(WITHIN_S), "the request has no adapter"
        assert world.ending.result(WITHIN_S)
    assert world.engine.events[:4] == ["load a", "load b", "evict a", "load a"]
    (kept,) = world.engine.here
    assert +world.files.held == {kept: 1}
    assert world.adapters._in_use.keys() == world.adapters._loading.keys() == {kept}


def test_unused_adapters_leave_when_memory_is_too_small_for_another_one(world: World) -> None:
    world.engine.busy.set()
    assert world.ending.result(WITHIN_S)
    world.engine.room = 1
    with world.adapters.use("c", "me", RequestHandle()):
        assert world.engine.here == {"c"}
        with pytest.raises(Unavailable):
            world.use("d")
        assert world.engine.here == {"c"}, "one that is in use stays"
    assert world.use("d")
    assert world.engine.here == {"d"}
    assert +world.files.held == {"d": 1}


def test_an_adapter_that_memory_is_too_small_for_alone_is_not_tried_again(world: World) -> None:
    world.engine.busy.set()
    assert world.ending.result(WITHIN_S)
    world.engine.room = 0
    with pytest.raises(ServerOpError, match=r"memory is too small for c, though .* lower rank"):
        world.use("c")
    assert not world.engine.here
    assert not +world.files.held


def test_an_adapter_is_tried_again_when_a_request_for_the_base_model_may_have_the_memory(world: World) -> None:
    world.engine.busy.set()
    assert world.ending.result(WITHIN_S)
    world.engine.room = 0
    with world.adapters.use("", "me", RequestHandle()), pytest.raises(Unavailable):
        world.use("c")
    assert not world.adapters._in_use
    assert not world.adapters._loading


@pytest.mark.parametrize("change", ["leaves", "comes"])
def test_an_adapter_is_tried_again_when_such_a_request_leaves_or_comes_during_the_last_try(
    world: World, change: str
) -> None:
    world.engine.busy.set()
    assert world.ending.result(WITHIN_S)
    world.engine.room = 0
    base = world.adapters.use("", "me", RequestHandle())
    tries = []

    def loading(prefix: str) -> None:
        tries.append(prefix)
        if len(tries) == 2:
            base.__exit__(None, None, None) if change == "leaves" else base.__enter__()

    world.engine.loading = loading
    if change == "leaves":
        base.__enter__()
    with pytest.raises(Unavailable):
        world.use("c")
    assert tries == ["c", "c"]
    if change == "comes":
        base.__exit__(None, None, None)
