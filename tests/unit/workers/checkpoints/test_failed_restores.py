"""A model that cannot be restored costs no weights that could still be uploaded, and keeps nobody waiting."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import redis

from app.errors import NoMemory, Requeue, ServerOpError, Unavailable
from app.stores.redis import keys
from tests.unit.workers.checkpoints.test_shm_transfer import (
    await_upload,
    dies_at_once,
    expected,
    files,
    healthy,
    on_record,
    stored_adapter,
    transferred,
)
from tests.unit.workers.conftest import MODEL, World, await_true, step
from tests.unit.workers.train.saves import GatedStore, admit, store
from workers.train.executor import Executor

__all__ = ["dies_at_once", "store"]  # the fixtures


def left_by_a_lost_worker(world: World, store: GatedStore) -> str:
    """The prefix of new weights that were committed and not uploaded, behind a snapshot."""
    worker = world.worker("a/1", share=math.inf, store=store)
    prefix = transferred(worker, world, 0)
    world.await_snapshot(2)
    worker.shm_transfers.close()
    worker.snapshots.close()
    world.client.delete(keys.lease(MODEL))
    return prefix


def its_snapshot_is_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(world.folder / "objects" / "models" / MODEL / "snapshots")


def it_breaks_the_backend(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Executor, "restore", raising(RuntimeError("the device is gone")))


def it_ended_three_workers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as deadly:
        deadly.setattr(Executor, "restore", raising(KeyboardInterrupt()))
        for boot in range(3):
            with pytest.raises(KeyboardInterrupt):
                world.worker(f"c/{boot}", store=healthy(world)).handle(3, "catch_up")


def raising(error: BaseException) -> Callable[..., NoReturn]:
    def restore(*_: Any) -> NoReturn:
        raise error

    return restore


@pytest.mark.parametrize("why", [its_snapshot_is_lost, it_breaks_the_backend, it_ended_three_workers])
def test_a_run_that_cannot_be_restored_keeps_no_sampler_waiting(
    world: World,
    store: GatedStore,
    monkeypatch: pytest.MonkeyPatch,
    why: Callable[[World, pytest.MonkeyPatch], None],
):
    prefix = left_by_a_lost_worker(world, store)
    why(world, monkeypatch)
    successor = world.worker("c/3", store=healthy(world))
    for left in ([prefix], [prefix], []):
        successor.handle(3, "catch_up")
        assert on_record(world) == left
    with pytest.raises(ServerOpError, match="gone"), files(world, store, "c").use(prefix):
        pass


@pytest.mark.parametrize("error", [Unavailable("a replica is behind"), redis.ConnectionError("away")])
def test_a_break_is_handled_as_one_although_it_cannot_be_reported(
    world: World, store: GatedStore, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    """All states here are suspect."""
    left_by_a_lost_worker(world, store)
    it_breaks_the_backend(world, monkeypatch)
    successor = world.worker("b/1", store=healthy(world))
    monkeypatch.setattr(successor.owner, "_lost", raising(error))
    admit(world, *step(1), first=4)
    with pytest.raises(Requeue, match="broke the backend"):
        successor.handle(4)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_break_does_not_count_for_a_model_that_another_worker_continued_meanwhile(
    world: World, store: GatedStore, monkeypatch: pytest.MonkeyPatch, goes_on: bool
):
    left_by_a_lost_worker(world, store)
    successor, lost = world.worker("b/1", store=healthy(world)), list[str]()

    def restore(*_: Any) -> NoReturn:
        if goes_on:
            world.client.delete(keys.lease(MODEL))
            world.oplog.acquire(MODEL, "d/1")
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(Executor, "restore", restore)
    monkeypatch.setattr(successor.owner, "_lost", lost.append)
    successor.handle(3, "catch_up")
    assert lost == ([] if goes_on else [MODEL])


@pytest.mark.parametrize("worker", ["a/2", "b/1"], ids=["same machine", "other machine"])
def test_memory_that_is_short_in_restores_costs_no_adapter_and_no_snapshot(
    world: World, store: GatedStore, monkeypatch: pytest.MonkeyPatch, worker: str
):
    prefix = left_by_a_lost_worker(world, store)
    local = sorted((world.folder / "a" / "snapshots").rglob("*.safetensors"))
    successor = world.worker(worker, store=healthy(world))
    with monkeypatch.context() as memory:
        memory.setattr(successor.backend, "apply", lambda ops: dict.fromkeys(ops, NoMemory("full")))
        for _ in range(4):
            successor.handle(3, "catch_up")
    assert on_record(world) == ([] if worker == "a/2" else [prefix]), "its files are here, or it waits for a restore"
    assert sorted((world.folder / "a" / "snapshots").rglob("*.safetensors")) == local != []
    successor.handle(3, "catch_up")
    await_upload(world)
    assert stored_adapter(world, prefix) == expected(world, 0)


def test_a_restore_that_fails_for_a_while_costs_no_adapter(world: World, store: GatedStore):
    """Its machine is gone, and the snapshot cannot be read now."""
    prefix = left_by_a_lost_worker(world, store)
    snapshots = world.folder / "objects" / "models" / MODEL / "snapshots"
    away = snapshots.rename(world.folder / "away")
    successor = world.worker("b/1", store=healthy(world))
    for _ in range(2):
        successor.handle(3, "catch_up")
    away.rename(snapshots)
    successor.handle(3, "catch_up")
    await_upload(world)
    assert stored_adapter(world, prefix) == expected(world, 0)
    assert not successor.shm_transfers._failed, "an old failure does not count for ever"
    assert not successor.shm_transfers.lost(), "what is restored now need not be restored again"


def test_a_restore_that_fails_costs_no_adapter_whose_files_are_here(world: World, store: GatedStore):
    """The upload needs no restore, and the next restore may succeed."""
    prefix = left_by_a_lost_worker(world, store)
    shutil.rmtree(world.folder / "objects" / "models" / MODEL / "snapshots")
    shutil.rmtree(world.folder / "a" / "snapshots", ignore_errors=True)
    away = (world.folder / "handover").rename(world.folder / "away")
    again = world.worker("a/1", store=healthy(world))
    away.rename(world.folder / "handover")  # only now: the start of a worker uploads what it finds
    admit(world, *step(1), first=4)
    with pytest.raises(Requeue, match="cannot be restored"):
        again.handle(4)
    await_upload(world)
    assert stored_adapter(world, prefix) == expected(world, 0)


def test_restores_that_fail_while_the_store_takes_nothing_cost_no_adapter_whose_files_are_here(
    world: World, store: GatedStore
):
    prefix = left_by_a_lost_worker(world, store)
    shutil.rmtree(world.folder / "objects" / "models" / MODEL / "snapshots")
    shutil.rmtree(world.folder / "a" / "snapshots", ignore_errors=True)
    slow = GatedStore(world.folder / "objects")
    successor = world.worker("a/2", store=slow)
    for _ in range(4):
        successor.handle(3, "catch_up")
    left = on_record(world)
    slow.open.set()
    assert left == [prefix]
    await_upload(world)
    assert stored_adapter(world, prefix) == expected(world, 0)


def test_a_model_that_is_not_here_is_not_discarded_at_every_tick(
    world: World, store: GatedStore, monkeypatch: pytest.MonkeyPatch
):
    """To discard it is a message to all ranks."""
    left_by_a_lost_worker(world, store)
    shutil.rmtree(world.folder / "objects" / "models" / MODEL / "snapshots")
    successor = world.worker("b/1", store=healthy(world))
    successor.handle(3, "catch_up")
    await_true(successor.shm_transfers.lost, "the upload finds nothing to send")
    closed: list[str] = []
    monkeypatch.setattr(successor.backend, "close", closed.append)
    successor.on_tick()
    assert closed == []
