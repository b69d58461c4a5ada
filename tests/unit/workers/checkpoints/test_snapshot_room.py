"""Local snapshots that are of no more use make room, also on a full disk; and waiting copies leave the memory."""

from __future__ import annotations

import math
import os
import shutil
import time
from types import SimpleNamespace

import pytest
import redis

from app.errors import Unavailable
from app.stores.redis import keys
from tests.unit.workers.checkpoints.test_snapshots import Shaky, local, train
from tests.unit.workers.conftest import MODEL, Worker, World, await_true

ENDED = "ended:train:0"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The disk that snapshots are checked against: it has `free` bytes free."""
    disk = SimpleNamespace(free=2**40)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: disk)
    return disk


def waits_for_disk(worker: Worker) -> bool:
    """True also while a try is made."""
    writes = worker.snapshots._pipeline._writes
    with writes._changed:
        return MODEL in writes._waiting or writes._busy_with(MODEL)


def test_a_full_disk_gets_room_from_models_that_are_no_more(
    world: World, disk: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    worker = world.worker("a/1", share=math.inf, free_disk_bytes=1)
    of_ended = world.folder / "a" / "snapshots" / ENDED / "4-1"
    of_ended.mkdir(parents=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0 if of_ended.exists() else 2**40))
    train(world, worker, [0])
    world.await_snapshot(2)
    assert not of_ended.exists()


def test_an_error_while_room_is_made_stops_no_snapshot(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    worker = world.worker("a/1", share=math.inf)

    def fails() -> None:
        raise redis.ConnectionError

    monkeypatch.setattr(worker.snapshots._pipeline, "_clear", fails)
    train(world, worker, [0])
    world.await_snapshot(2)
    assert "could not be cleared" in caplog.text and "tried again" not in caplog.text


def test_a_copy_that_waits_for_the_disk_is_dropped_once_another_trainer_owns_its_model(
    world: World, disk: SimpleNamespace, caplog: pytest.LogCaptureFixture
):
    worker = world.worker("a/1", free_disk_bytes=1)
    train(world, worker, [0])
    disk.free = 0
    worker.owner.evict(MODEL)
    await_true(lambda: caplog.text.count("is tried again") >= 2, "it is tried")
    assert waits_for_disk(worker), "nobody else has the model yet"
    world.worker("b/1").owner.own(MODEL)
    await_true(lambda: not waits_for_disk(worker), "the copy stays in memory")
    assert local(world) == []


def test_a_copy_of_an_evicted_model_is_written_once_the_disk_has_room(world: World, disk: SimpleNamespace):
    worker = world.worker("a/1", free_disk_bytes=1)
    train(world, worker, [0])
    disk.free = 0
    worker.owner.evict(MODEL)
    disk.free = 2**40
    world.await_snapshot(2)


def test_a_restore_waits_until_the_disk_has_room_for_its_snapshot(world: World, disk: SimpleNamespace):
    train(world, world.worker("a/1", share=math.inf), [0])
    world.await_snapshot(2)
    world.client.delete(keys.lease(MODEL))
    disk.free = 1
    other = world.worker("b/1", free_disk_bytes=1)
    with pytest.raises(Unavailable, match="free_disk_bytes"):
        other.owner.own(MODEL)
    disk.free = 2**40
    other.owner.own(MODEL)


def test_an_earlier_process_leaves_no_snapshots_of_a_model_that_another_machine_continued(world: World):
    train(world, world.worker("a/1", share=math.inf), [0])
    world.await_snapshot(2)
    restarted = world.worker("a/2")
    restarted.snapshots.clear()
    assert local(world) == [2], "it may be restored here"
    world.client.delete(keys.lease(MODEL))
    train(world, world.worker("b/1", share=math.inf), [1])
    world.await_snapshot(4)
    restarted.snapshots.clear()
    assert local(world) == []


def test_the_copy_of_a_durable_snapshot_that_nobody_used_for_long_makes_room(world: World):
    train(world, world.worker("a/1", share=math.inf), [0])
    world.await_snapshot(2)
    restarted = world.worker("a/2", idle_s=500.0)
    age(world, 900)
    restarted.snapshots.clear()
    assert local(world) == [2]
    age(world, 1100)
    train(world, restarted, [1])
    restarted.snapshots.clear()
    assert local(world) == [2], "it was restored from here a moment ago"
    restarted.snapshots._tracks.clear()
    restarted.snapshots.clear()
    assert local(world) == [2], "nor does another trainer of this machine remove it"
    age(world, 1100)
    restarted.snapshots.clear()
    assert local(world) == []
    world.client.delete(keys.lease(MODEL))
    train(world, world.worker("a/3"), [2])


def test_what_only_this_machine_has_stays_however_old_it_is(world: World):
    store = Shaky(world.folder / "objects")
    store.away = True
    train(world, world.worker("a/1", share=math.inf, store=store), [0])
    await_true(lambda: local(world) == [2], "the snapshot is not on the disk")
    age(world, 10**6)
    world.worker("a/2", store=store).snapshots.clear()
    assert local(world) == [2]


def age(world: World, seconds: float) -> None:
    """Makes the snapshots on the disk as old as that."""
    then = time.time() - seconds
    for folder in (world.folder / "a" / "snapshots" / MODEL).iterdir():
        os.utime(folder, (then, then))
