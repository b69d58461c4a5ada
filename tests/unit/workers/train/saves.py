"""A store whose saves wait for a test, and the Ops that run meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app import ids
from app.domain import ops as domain_ops
from app.domain.ops import Op, SaveWeights
from app.domain.records import Checkpoint
from app.domain.results import Result
from app.stores.objects.folder import FolderStore
from app.stores.redis import keys
from app.stores.redis.records import load
from tests.unit.workers.conftest import (
    LORA,
    MODEL,
    Worker,
    World,
    await_true,
    step,
)
from workers.backends.training.base import ADAPTER_FILE, OPTIMIZER_FILE, Create

OTHER = "session:train:1"
SAVE = SaveWeights("weights", "kept")


class GatedStore(FolderStore):
    """Stores no checkpoint until its gate is `open`, and then raises `error` if there is one; snapshots pass. `asked`:
    a caller is or was at the gate."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "secret", "http://x")
        self.asked, self.open = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def put_new(self, key: str, source: Path | bytes) -> bool:
        if "/snapshots/" not in key:
            self.asked.set()
            assert self.open.wait(60), "nobody opened the gate"
            if self.error:
                raise self.error
        return super().put_new(key, source)


class Ran:
    """The kinds of the Ops that the backend ran, by model, in order."""

    def __init__(self, worker: Worker) -> None:
        self._inner = worker.backend
        self.kinds: dict[str, list[str]] = {}
        self.captured = 0
        object.__setattr__(worker.runner._committer._executor, "backend", self)
        object.__setattr__(worker.runner._committer._executor.saver, "backend", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def apply(self, ops: Mapping[str, Any]) -> Any:
        for model_id, op in ops.items():
            self.kinds.setdefault(model_id, []).append(getattr(op, "kind", type(op).__name__))
        return self._inner.apply(ops)

    def capture(self, model_id: str, **parts: bool) -> Any:
        self.captured += 1
        return self._inner.capture(model_id, **parts)


@pytest.fixture
def store(world: World) -> Iterator[GatedStore]:
    store = GatedStore(world.folder / "objects")
    yield store
    store.open.set()


@pytest.fixture
def dispatch(store: GatedStore) -> Iterator[Callable[..., Future[Result | None]]]:
    """Handles a dispatch in a thread, like the task thread."""
    with ThreadPoolExecutor(1) as thread:

        def dispatch(worker: Worker, seq: int, kind: str = SAVE.kind, model_id: str = MODEL) -> Future[Result | None]:
            return thread.submit(worker.runner.handle, ids.request_id(model_id, seq), model_id, kind)

        yield dispatch
        store.open.set()


Dispatch = Callable[..., "Future[Result | None]"]


def admit(world: World, *ops: Op, first: int = 1, model_id: str = MODEL) -> None:
    for seq, op in enumerate(ops, first):
        payload = domain_ops.encode(op)
        world.oplog.admit(model_id, seq, op.kind, payload, domain_ops.digest(payload))


def applied(world: World, model_id: str = MODEL) -> int:
    return int(world.client.hget(keys.model(model_id), "applied"))


def saved_files(world: World, name: str = "kept") -> dict[str, bytes]:
    stored = world.records.get(Checkpoint.namespace, f"tinker://{MODEL}/weights/{name}")
    assert stored is not None, f"{name} is not listed"
    folder = world.folder / "objects" / load(Checkpoint, stored).prefix
    return {file: (folder / file).read_bytes() for file in (ADAPTER_FILE, OPTIMIZER_FILE)}


def expected_files(world: World, seeds: list[int]) -> dict[str, bytes]:
    """The files of a save after these steps when nothing runs at the same time."""
    backend = world.worker("reference/0").backend
    for op in [Create(LORA), *(op for seed in seeds for op in step(seed))]:
        backend.apply({MODEL: op})
    folder = world.folder / "expected"
    folder.mkdir()
    backend.capture(MODEL, optimizer=True)(folder)
    return {file: (folder / file).read_bytes() for file in (ADAPTER_FILE, OPTIMIZER_FILE)}


def goes_on_waiting(worker: Worker, dispatched: Future[Result | None]) -> None:
    """The runner looks ten more times for work, finds none, and continues to wait."""
    saves, looks = worker.runner._background_saves, list[float]()
    await_any = saves.await_any

    def looked(seconds: float) -> None:
        looks.append(seconds)
        await_any(seconds)

    object.__setattr__(saves, "await_any", looked)
    await_true(lambda: len(looks) > 10, "it looks again")
    assert not dispatched.done()
