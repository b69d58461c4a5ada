"""Snapshots of a model beside its journal, on the local disk and in the object store, through every failure."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from app.domain import ops
from app.domain.ops import SaveWeights
from app.errors import Requeue, Unavailable
from app.stores.objects.folder import FolderStore
from app.stores.redis import keys
from app.stores.redis.types import Lease
from tests.full_disk import full_disk
from tests.unit.workers.conftest import MODEL, Worker, World, await_true, logprob_bytes, probe, step, undisturbed
from workers.checkpoints import transfer

WITHIN_S = 60.0


class Shaky(FolderStore):
    """A folder store that may be `away`, and that stores nothing while its `gate` is shut."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "secret", "http://x")
        self.away = False
        self.gate = threading.Event()
        self.gate.set()
        self.began: list[str] = []

    def put_new(self, key: str, source: Path | bytes) -> bool:
        self._answer()
        self.began.append(key)
        assert self.gate.wait(WITHIN_S)
        return super().put_new(key, source)

    def get(self, key: str, target: Path) -> None:
        self._answer()
        super().get(key, target)

    def read(self, key: str) -> bytes:
        self._answer()
        return super().read(key)

    def list(self, prefix: str) -> list[str]:
        self._answer()
        return super().list(prefix)

    def delete(self, doomed: Iterable[str]) -> None:
        self._answer()
        super().delete(doomed)

    def _answer(self) -> None:
        if self.away:
            raise Unavailable("the store is away")


@pytest.fixture
def store(world: World) -> Shaky:
    return Shaky(world.folder / "objects")


def train(world: World, worker: Worker, seeds: Iterable[int]) -> int:
    """Runs one step for each seed, whose seq follows from it; returns the last seq."""
    seq = 0
    for seed in seeds:
        for seq, op in enumerate(step(seed), 2 * seed + 1):
            world.admit(seq, op)
            result = worker.handle(seq)
            assert result is not None and not result.failed
    return seq


def local(world: World, node: str = "a") -> list[int]:
    """Seqs of the snapshots on that machine's disk."""
    folder = world.folder / node / "snapshots" / MODEL
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name.partition("-")[0]) for name in names if not name.startswith("."))


def stored(world: World) -> set[str]:
    """Prefixes of the snapshots in the object store."""
    keys = FolderStore(world.folder / "objects", "secret", "http://x").list(f"models/{MODEL}/snapshots/")
    return {key.rpartition("/")[0] for key in keys}


def waits_for_upload(worker: Worker) -> int | None:
    """Seq of the snapshot that is uploaded next."""
    written = worker.snapshots._pipeline._uploads._waiting.get(MODEL)
    return written.local.seq if written is not None else None


def pointer(world: World) -> str:
    return world.head()[b"snapshot"].decode()


def test_training_does_not_wait_for_the_store_and_the_newest_snapshot_wins(world: World, store: Shaky):
    worker = world.worker("a/1", share=math.inf, store=store)
    set_snapshot, pointed = world.oplog.set_snapshot, []

    def watched(lease: Lease, seq: int, reference: str) -> str:
        pointed.append(seq)
        return set_snapshot(lease, seq, reference)

    world.oplog.set_snapshot = watched
    store.gate.clear()
    train(world, worker, [0])
    await_true(lambda: store.began, "no upload began")
    train(world, worker, [1, 2, 3])
    await_true(lambda: waits_for_upload(worker) == 8, "the newest one is not on the disk")
    assert int(world.head()[b"snapshot_seq"]) == -1
    store.gate.set()
    world.await_snapshot(8)
    assert pointed == [2, 8], "the upload that had begun was disturbed, or one that was replaced was uploaded"


def test_of_durable_snapshots_only_the_newest_is_kept_here_and_there(world: World, store: Shaky):
    worker = world.worker("a/1", share=math.inf, store=store)
    for seed in range(3):
        world.await_snapshot(train(world, worker, [seed]))
    await_true(lambda: stored(world) == {pointer(world)}, "an older one is still stored")
    await_true(lambda: local(world) == [6], "an older one is still on the disk")


def test_with_the_store_away_training_goes_on_and_afterwards_the_journal_is_trimmed(world: World, store: Shaky):
    expected = undisturbed(world, list(range(4)))
    worker = world.worker("a/1", share=math.inf, store=store)
    world.await_snapshot(train(world, worker, [0]))
    before = pointer(world)
    store.away = True
    train(world, worker, [1, 2, 3])
    await_true(lambda: local(world)[-1:] == [8], "the snapshot is not on the disk")
    assert pointer(world) == before, "the durable one stays until the next"
    assert world.oplog.entry(MODEL, 3) is not None
    store.away = False
    world.await_snapshot(8)
    assert world.oplog.entry(MODEL, 8) is None
    world.client.delete(keys.lease(MODEL))
    assert logprob_bytes(probe(world.worker("b/1"), world, 9)) == expected


@pytest.mark.parametrize("durable", [True, False])
def test_a_restart_needs_no_store_when_the_disk_has_what_is_durable_or_newer(world: World, store: Shaky, durable: bool):
    expected = undisturbed(world, list(range(3)))
    worker = world.worker("a/1", share=math.inf, store=store)
    store.away = not durable
    train(world, worker, [0, 1])
    if durable:
        world.await_snapshot(4)
    await_true(lambda: local(world)[-1:] == [4], "the snapshot is not on the disk")
    worker.snapshots.close()
    store.away = True
    successor = world.worker("a/2", store=store)
    train(world, successor, [2])
    assert logprob_bytes(probe(successor, world, 7)) == expected
    store.away = False
    world.await_snapshot(4)
    assert world.oplog.entry(MODEL, 4) is None
    assert durable or pointer(world).endswith(f"/4-{successor.owner.residents()[MODEL].lease.epoch}"), (
        "not its own epoch"
    )


def test_a_replay_needs_nothing_behind_the_snapshot_on_the_disk(world: World, store: Shaky):
    expected = undisturbed(world, list(range(3)))
    worker = world.worker("a/1", share=math.inf, store=store)
    store.away = True
    train(world, worker, [0, 1])
    await_true(lambda: local(world)[-1:] == [4], "the snapshot is not on the disk")
    worker.snapshots.close()
    for seq in range(5):
        world.client.delete(keys.payload(f"{MODEL}:{seq}"))
    successor = world.worker("a/2", store=store)
    train(world, successor, [2])
    assert logprob_bytes(probe(successor, world, 7)) == expected


@pytest.mark.parametrize("durable", [True, False], ids=["as new as the durable one", "newer"])
def test_a_damaged_snapshot_on_the_disk_is_dropped_and_the_durable_one_used(world: World, store: Shaky, durable: bool):
    expected = undisturbed(world, list(range(2)))
    worker = world.worker("a/1", share=math.inf, store=store)
    world.await_snapshot(train(world, worker, [0]))
    store.away = not durable
    train(world, worker, [1])
    if durable:
        world.await_snapshot(4)
    await_true(lambda: local(world)[-1:] == [4], "the snapshot is not on the disk")
    worker.snapshots.close()
    weights = next((world.folder / "a" / "snapshots" / MODEL).glob("4-*/optimizer.safetensors"))
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    store.away = False
    successor = world.worker("a/2", store=store)
    assert logprob_bytes(probe(successor, world, 5)) == expected
    await_true(lambda: local(world) == [], "the damaged one is still there")


def test_within_the_budget_there_is_none_until_the_journal_has_grown_too_large(world: World, store: Shaky):
    a_step = sum(len(ops.encode(op)) for op in step(0))
    worker = world.worker("a/1", store=store, journal_bytes=int(2.5 * a_step))
    train(world, worker, [0, 1])
    assert local(world) == []
    train(world, worker, [2])
    world.await_snapshot(6)
    train(world, worker, [3, 4])
    assert int(world.head()[b"snapshot_seq"]) == 6
    train(world, worker, [5])
    world.await_snapshot(12)


def test_what_a_new_owner_replayed_counts_towards_the_size_of_the_journal(world: World, store: Shaky):
    a_step = sum(len(ops.encode(op)) for op in step(0))
    train(world, world.worker("a/1", store=store), [0, 1])
    successor = world.worker("a/2", store=store, journal_bytes=int(2.5 * a_step))
    train(world, successor, [2])
    world.await_snapshot(6)


def test_an_outage_does_not_make_every_step_a_snapshot(world: World, store: Shaky):
    a_step = sum(len(ops.encode(op)) for op in step(0))
    worker = world.worker("a/1", store=store, journal_bytes=int(1.5 * a_step))
    store.away = True
    train(world, worker, [0, 1])
    await_true(lambda: local(world)[-1:] == [4], "the snapshot is not on the disk")
    train(world, worker, [2])
    assert worker.snapshots._track(MODEL).unsaved, "nothing was taken"
    train(world, worker, [3])
    await_true(lambda: local(world)[-1:] == [8], "the next one is not on the disk")


def test_to_settle_makes_a_clean_state_durable(world: World, store: Shaky):
    worker = world.worker("a/1", store=store)
    train(world, worker, [0])
    probe(worker, world, 3)
    worker.snapshots.settle(worker.owner.residents()[MODEL], within_s=WITHIN_S)
    assert int(world.head()[b"snapshot_seq"]) == 3
    first = pointer(world)
    probe(worker, world, 4)
    worker.snapshots.settle(worker.owner.residents()[MODEL], within_s=WITHIN_S)
    assert pointer(world) == first, "nothing had changed"


def test_to_settle_takes_nothing_while_gradients_are_pending(world: World, store: Shaky):
    expected = undisturbed(world, list(range(2)))
    worker = world.worker("a/1", store=store)
    train(world, worker, [0])
    backward, optim_step = step(1)
    world.admit(3, backward)
    worker.handle(3)
    worker.snapshots.settle(worker.owner.residents()[MODEL], within_s=WITHIN_S)
    assert (local(world), pointer(world)) == ([], "")
    successor = world.worker("a/2", store=store)
    world.admit(4, optim_step)
    successor.handle(4)
    assert logprob_bytes(probe(successor, world, 5)) == expected


def test_to_settle_gives_up_on_a_store_that_is_away_and_the_snapshot_goes_on_by_itself(world: World, store: Shaky):
    worker = world.worker("a/1", store=store)
    train(world, worker, [0])
    store.away = True
    worker.owner.evict(MODEL)
    await_true(lambda: local(world) == [2], "the snapshot is not on the disk")
    store.away = False
    world.await_snapshot(2)


def test_settle_does_not_wait_longer_than_it_may(world: World, store: Shaky):
    worker = world.worker("a/1", store=store)
    train(world, worker, [0])
    store.gate.clear()
    began = time.monotonic()
    worker.snapshots.settle(worker.owner.residents()[MODEL], within_s=0.2)
    assert time.monotonic() - began < WITHIN_S / 2
    assert pointer(world) == ""
    store.gate.set()
    world.await_snapshot(2)


def test_a_replaced_owner_neither_overwrites_nor_removes_what_its_successor_stored(world: World, store: Shaky):
    expected = undisturbed(world, list(range(4)))
    old = world.worker("a/1", share=math.inf, store=store)
    world.await_snapshot(train(world, old, [0]))
    store.gate.clear()
    train(world, old, [1])
    await_true(lambda: any("/snapshots/4/" in key for key in store.began), "no upload began")
    world.client.delete(keys.lease(MODEL))
    new = world.worker("b/1", share=math.inf)
    world.await_snapshot(train(world, new, [2]))
    theirs = pointer(world)
    before = {path: path.read_bytes() for path in (world.folder / "objects" / theirs).iterdir()}
    store.gate.set()
    old.snapshots._pipeline.finish(MODEL, WITHIN_S)
    assert pointer(world) == theirs
    assert {path: path.read_bytes() for path in (world.folder / "objects" / theirs).iterdir()} == before
    train(world, new, [3])
    world.client.delete(keys.lease(MODEL))
    assert logprob_bytes(probe(world.worker("c/1"), world, 9)) == expected


def test_a_snapshot_whose_pointer_was_set_though_the_answer_was_lost_is_done(world: World, store: Shaky):
    worker = world.worker("a/1", share=math.inf, store=store)
    world.await_snapshot(train(world, worker, [0]))
    before = pointer(world)
    set_snapshot, unanswered = world.oplog.set_snapshot, []

    def lossy(*arguments: object) -> str:
        replaced = set_snapshot(*arguments)
        if not unanswered:
            unanswered.append(replaced)
            raise ConnectionError("the answer was lost")
        return replaced

    world.oplog.set_snapshot = lossy
    train(world, worker, [1])
    await_true(lambda: worker.snapshots._track(MODEL).is_durable, "it was not noticed")
    worker.snapshots._pipeline.finish(MODEL, WITHIN_S)  # what it deletes is deleted by then
    assert unanswered == [before]
    assert pointer(world) in stored(world)


def test_a_full_disk_leaves_the_old_snapshot_and_the_model_as_they_are(world: World, store: Shaky):
    expected = undisturbed(world, list(range(4)))
    worker = world.worker("a/1", share=math.inf, store=store)
    world.await_snapshot(train(world, worker, [0]))
    await_true(lambda: local(world) == [2], "the snapshot is not on the disk")
    with full_disk(10_000):
        train(world, worker, [1, 2])
        worker.snapshots._pipeline.finish(MODEL, WITHIN_S)
        assert local(world) == [2]
        transfer.verify(next((world.folder / "a" / "snapshots" / MODEL).glob("2-*")))
        assert int(world.head()[b"snapshot_seq"]) == 2
    world.await_snapshot(6)
    train(world, worker, [3])
    assert logprob_bytes(probe(worker, world, 9)) == expected


def test_a_save_on_a_full_disk_is_put_off_and_works_later(world: World):
    worker = world.worker("a/1")
    train(world, worker, [0])
    world.admit(3, SaveWeights("weights", "kept"))
    with full_disk(10_000):
        for _ in range(4):
            with pytest.raises(Requeue, match="cannot be written"):
                worker.handle(3, "save_weights")
    result = worker.handle(3, "save_weights")
    assert result is not None and not result.failed


def test_the_disk_is_cleared_of_models_that_are_no_more(world: World, store: Shaky):
    worker = world.worker("a/1", share=math.inf, store=store)
    world.await_snapshot(train(world, worker, [0]))
    worker.snapshots.clear()
    assert local(world) == [2]
    world.client.hset(keys.model(MODEL), "ended", "deleted")
    worker.snapshots.clear()
    assert local(world) == []


def test_the_disk_is_cleared_of_what_is_durable_and_long_unused(world: World, store: Shaky):
    worker = world.worker("a/1", share=math.inf, store=store, idle_s=0.001)
    world.await_snapshot(train(world, worker, [0]))
    await_true(lambda: worker.snapshots._track(MODEL).is_durable, "it was not noticed")
    store.away = True
    train(world, worker, [1])
    await_true(lambda: local(world)[-1:] == [4], "the snapshot is not on the disk")
    worker.snapshots.clear()
    assert local(world)[-1:] == [4], "what is not durable stays"
    store.away = False
    world.await_snapshot(4)
    await_true(lambda: worker.snapshots._track(MODEL).is_durable, "it was not noticed")
    for _ in range(2):  # of a model that this trainer no longer has, the age on the disk counts
        worker.snapshots.clear()
    assert local(world) == []
    assert train(world, worker, [2]) == 6


def test_another_trainers_snapshots_stay_when_a_model_is_long_unused_here(world: World, store: Shaky):
    worker = world.worker("a/1", share=math.inf, store=store, idle_s=0.001)
    world.await_snapshot(train(world, worker, [0]))
    await_true(lambda: worker.snapshots._track(MODEL).is_durable, "it was not noticed")
    (world.folder / "a" / "snapshots" / MODEL / "6-2").mkdir()
    for _ in range(2):
        worker.snapshots.clear()
    assert local(world) == [6], "it is not durable"


def test_a_backend_that_cannot_be_captured_stops_no_training(world: World, store: Shaky, monkeypatch):
    worker = world.worker("a/1", share=math.inf, store=store)

    def broken(model_id: str, *, optimizer: bool) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(worker.backend, "capture", broken)
        train(world, worker, [0])
    train(world, worker, [1])
    world.await_snapshot(4)
