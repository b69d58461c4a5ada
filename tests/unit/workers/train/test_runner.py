"""Order, ownership and recovery of a model's journal, on a real backend and a real server."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import pytest
import redis

from app.domain.ops import LoadWeights, SaveWeights
from app.domain.records import Checkpoint
from app.domain.results import Result
from app.errors import Requeue, Unavailable
from app.stores.objects.folder import FolderStore
from app.stores.redis import keys
from app.stores.redis.records import load
from tests.unit.workers.conftest import BASE, MODEL, PROBE, Ended, World, logprob_bytes, probe, step, undisturbed


def test_ops_run_in_seq_order_whatever_the_order_of_arrival_and_of_dispatches(world: World):
    expected = undisturbed(world, list(range(5)))
    ops = [op for i in range(5) for op in step(i)]
    worker = world.worker("a/1")
    order = list(range(len(ops)))
    random.Random(3).shuffle(order)
    waiting = [0]
    for i in order:
        world.admit(i + 1, ops[i])
        waiting.append(i + 1)
        for seq in random.Random(i).sample(waiting, len(waiting)):
            try:
                worker.handle(seq)
            except Requeue:
                continue
            waiting = [s for s in waiting if s > seq]
    assert logprob_bytes(probe(worker, world, len(ops) + 1)) == expected


def test_a_dispatch_before_its_predecessor_is_turned_away_and_dispatched_when_the_gap_closes(world: World):
    worker = world.worker("a/1")
    create, backward = 0, 1
    world.admit(2, step()[1])
    worker.handle(create)
    with pytest.raises(Requeue, match=r"seq 1 of .* has not arrived"):
        worker.handle(2, "optim_step")
    world.admit(backward, step()[0])
    worker.handle(backward)
    assert worker.dispatched == [("optim_step", f"{MODEL}:2", f"train.{BASE}@a")]
    assert worker.handle(2, "optim_step") is not None


def test_a_doubled_dispatch_does_nothing_twice(world: World):
    expected = undisturbed(world, list(range(1)))
    worker = world.worker("a/1")
    for i, op in enumerate(step(0), 1):
        world.admit(i, op)
    results = [worker.handle(seq) for seq in (0, 1, 1, 2, 2, 1, 0, 2)]
    assert all(results)
    assert logprob_bytes(probe(worker, world, 3)) == expected


def test_a_new_owner_goes_on_bit_for_bit_from_the_journal_alone(world: World):
    expected = undisturbed(world, list(range(4)))
    ops = [op for i in range(4) for op in step(i)]
    for seq, op in enumerate(ops, 1):
        world.admit(seq, op)
        # A process dies after every second Op, also with pending gradients.
        worker = world.worker(f"a/{seq // 2}")
        worker.handle(seq)
        published = world.oplog.outcome(f"{MODEL}:1")
        assert published is not None
    assert logprob_bytes(probe(world.worker("a/last"), world, 9)) == expected


def test_a_new_owner_on_another_machine_goes_on_from_a_snapshot(world: World):
    expected = undisturbed(world, list(range(4)))
    ops = [op for i in range(4) for op in step(i)]
    first = world.worker("a/1", share=math.inf)
    for seq, op in enumerate(ops, 1):
        world.admit(seq, op)
        if seq <= 5:
            first.handle(seq)
    world.await_snapshot(4)
    assert world.oplog.entry(MODEL, 4) is None, "the journal is trimmed behind the snapshot"
    world.client.delete(keys.lease(MODEL))
    second = world.worker("b/1")
    for seq in (6, 7, 8):
        second.handle(seq)
    assert logprob_bytes(probe(second, world, 9)) == expected


def test_a_model_owned_elsewhere_is_dispatched_there(world: World):
    world.worker("a/1").handle(0)
    other = world.worker("b/1")
    world.admit(1, step()[0])
    with pytest.raises(Requeue, match="owned by a"):
        other.handle(1)
    assert other.dispatched == [("forward_backward", f"{MODEL}:1", f"train.{BASE}@a")]


def test_a_zombie_whose_lease_was_taken_changes_nothing(world: World):
    expected = undisturbed(world, list(range(2)))
    old, new = world.worker("a/1"), None
    old.handle(0)
    ops = [op for i in range(2) for op in step(i)]
    for seq, op in enumerate(ops, 1):
        world.admit(seq, op)
    old.handle(1)
    world.client.delete(keys.lease(MODEL))  # the old owner slept past the end of its lease
    new = world.worker("b/1")
    new.handle(2)
    with pytest.raises(Requeue):
        old.handle(3)
    new.handle(4)
    assert logprob_bytes(probe(new, world, 5)) == expected


def test_an_op_whose_gradients_never_came_fails_and_the_run_goes_on(world: World):
    worker = world.worker("a/1")
    worker.handle(0)
    world.admit(1, step(0)[0])
    worker.handle(1)
    for seq, op in ((3, step(0)[0]), (4, step(0)[1]), (5, step(1)[0]), (6, step(1)[1])):
        world.admit(seq, op)
    world.oplog.refuse(MODEL, 2, "seq 2 never came", "drop_gradients")
    results = [worker.handle(seq) for seq in (3, 4, 5, 6)]
    assert [result.failed for result in results] == [True, True, False, False]
    assert json.loads(results[0].body) == {"error": "seq 2 never came", "category": "user"}
    assert logprob_bytes(probe(worker, world, 7)) == undisturbed(world, [1])


def test_an_op_that_keeps_breaking_the_worker_is_given_up_and_the_next_ones_run(world: World):
    worker = world.worker("a/1")
    worker.handle(0)
    world.client.set(keys.payload(world.admit(1, step()[0])), b"\xc1 not an Op")
    for seq, op in ((2, step(0)[1]), (3, step(1)[0]), (4, step(1)[1])):
        world.admit(seq, op)
    for _ in range(3):
        with pytest.raises(Requeue):
            worker.handle(1)
    results = [worker.handle(seq) for seq in (1, 2, 3, 4)]
    assert [result.failed for result in results] == [True, True, False, False], "its step fails with it, the next runs"
    assert json.loads(results[0].body)["category"] == "server"
    assert logprob_bytes(probe(worker, world, 5)) == undisturbed(world, [1])


def test_a_load_does_not_need_its_checkpoint_again(world: World):
    worker = world.worker("a/1")
    path = f"tinker://{MODEL}/weights/kept"
    for seq, op in enumerate([*step(0), SaveWeights("weights", "kept"), *step(1)], 1):
        world.admit(seq, op)
        worker.handle(seq)
    stored = world.records.get("checkpoints", path)
    assert stored is not None
    world.admit(6, LoadWeights(path, optimizer=True, prefix=load(Checkpoint, stored).prefix))
    result = worker.handle(6)
    assert isinstance(result, Result) and not result.failed
    expected = probe(worker, world, 7)
    world.await_snapshot(6)
    shutil.rmtree(world.folder / "objects" / load(Checkpoint, stored).prefix)
    assert probe(world.worker("a/2"), world, 8) == expected


def check_step_of_an_heir_is_lost(world: World) -> None:
    """The step at seq 3 fails at a new owner and leaves nothing, and the next step is as without it."""
    heir = world.worker("a/2")
    lost = heir.handle(3)
    assert lost is not None and lost.failed
    assert "tokens out of range" in json.loads(lost.body)["error"]
    for seq, op in enumerate(step(1), 4):
        world.admit(seq, op)
        heir.handle(seq)
    expected = undisturbed(world, [1])
    assert logprob_bytes(probe(world.worker("a/3"), world, 6)) == expected


def test_a_step_behind_a_lost_gradient_fails_drops_the_rest_and_the_run_goes_on(world: World):
    """This also holds for a new owner, which reads it from the journal."""
    worker = world.worker("a/1")
    world.admit(1, step(0)[0])
    for seq in (0, 1):
        worker.handle(seq)
    world.oplog.refuse(MODEL, 2, "tokens out of range", "lost_batch")
    world.admit(3, step(0)[1])  # sent without waiting for the answer to seq 2
    check_step_of_an_heir_is_lost(world)


def test_nothing_replaces_a_refused_batch_that_other_chunks_may_follow(world: World):
    """The next chunk was sent after the refusal, as the same batch is when it is sent again."""
    world.oplog.refuse(MODEL, 1, "tokens out of range", "forward_backward")
    for seq, op in enumerate(step(0), 2):
        world.admit(seq, op)
    first = world.worker("a/1")
    for seq in (0, 1, 2):
        first.handle(seq)
    check_step_of_an_heir_is_lost(world)


def test_a_step_that_was_given_up_leaves_no_gradient_to_count_twice(world: World):
    worker = world.worker("a/1")
    world.admit(1, step(0)[0])
    for seq in (0, 1):
        worker.handle(seq)
    world.client.set(keys.payload(world.admit(2, step(0)[1])), b"\xc1 not an Op")
    for _ in range(3):
        with pytest.raises(Requeue):
            worker.handle(2)
    given_up = worker.handle(2)
    assert given_up is not None and given_up.failed
    for seq, op in enumerate(step(0), 3):
        world.admit(seq, op)
        worker.handle(seq)
    assert logprob_bytes(probe(worker, world, 5)) == undisturbed(world, [0])


def test_an_outage_in_mid_run_leaves_nothing_that_looks_as_if_it_ran(world: World, monkeypatch: pytest.MonkeyPatch):
    worker = world.worker("a/1")
    worker.handle(0)
    world.admit(1, step(0)[0])

    def away(*_: object) -> None:
        raise redis.ConnectionError("away")

    with monkeypatch.context() as outage:
        outage.setattr(world.oplog, "next", away)
        with pytest.raises(redis.ConnectionError):
            worker.handle(1)
    assert [pending.running for pending in world.oplog.pending()] == [0]
    again = worker.handle(1)
    assert again is not None and not again.failed


def test_a_model_that_cannot_be_brought_back_ends_what_waits_and_says_why(world: World):
    first = world.worker("a/1", share=math.inf)
    for seq, op in enumerate(step(0), 1):
        world.admit(seq, op)
        first.handle(seq)
    world.await_snapshot(2)
    shutil.rmtree(world.folder / "objects")
    shutil.rmtree(world.folder / "a" / "snapshots")
    world.admit(3, step(1)[0])
    heir = world.worker("a/2")
    for _ in range(2):
        with pytest.raises(Requeue):
            heir.handle(3)
    result = heir.handle(3)
    assert result is not None
    assert "cannot be restored" in json.loads(result.body)["error"]
    assert heir.handle(2) == world.oplog.outcome(f"{MODEL}:2"), "what was answered stays"


def test_a_forward_is_not_kept_for_replays(world: World):
    worker = world.worker("a/1")
    worker.handle(0)
    probe(worker, world, 1)
    assert world.client.exists(keys.payload(f"{MODEL}:1")) == 0
    assert probe(world.worker("a/2"), world, 2) is not None


class FarStore(FolderStore):
    """An object store that may be away."""

    away = False

    def put_new(self, key: str, source: Path | bytes) -> bool:
        self._check_there()
        return super().put_new(key, source)

    def get(self, key: str, target: Path) -> None:
        self._check_there()
        super().get(key, target)

    def read(self, key: str) -> bytes:
        self._check_there()
        return super().read(key)

    def _check_there(self) -> None:
        if self.away:
            raise Unavailable("the object store is away")


@pytest.fixture
def store(world: World) -> FarStore:
    return FarStore(world.folder / "objects", "secret", "http://x")


def test_a_save_waits_for_a_store_that_is_away_however_long_and_then_succeeds(
    world: World, store: FarStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("workers.train.scheduler._FIRST_PAUSE_S", 0.0)
    expected = undisturbed(world, [0])
    for seq, op in enumerate([*step(0), SaveWeights("weights", "kept"), PROBE], 1):
        world.admit(seq, op)
    store.away = True
    for boot in range(6):  # more often than an Op has attempts
        worker = world.worker(f"a/{boot}", store=store)
        for _ in range(3):
            with pytest.raises(Requeue, match="away"):
                worker.handle(4, "forward")
    assert [pending.running for pending in world.oplog.pending()] == [0]
    store.away = False
    saved = worker.handle(3, "save_weights")
    assert saved is not None and not saved.failed
    assert worker.dispatched == [("forward", f"{MODEL}:4", f"train.{BASE}@a")], "what came behind it is dispatched"
    looked = worker.handle(4)
    assert looked is not None and logprob_bytes(looked.body) == expected


def test_a_model_whose_snapshot_cannot_be_fetched_now_is_brought_back_later(
    world: World, store: FarStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("workers.train.scheduler._FIRST_PAUSE_S", 0.0)
    expected = undisturbed(world, [0, 1])
    first = world.worker("a/1", share=math.inf, store=store)
    for seq, op in enumerate([*step(0), *step(1)], 1):
        world.admit(seq, op)
    for seq in range(3):
        first.handle(seq)
    world.await_snapshot(2)
    first.owner.discard_all()
    store.away = True
    for boot in range(5):  # more often than an Op has attempts
        other = world.worker(f"b/{boot}", store=store)
        with pytest.raises(Requeue, match="away"):
            other.handle(4)
        assert not world.client.exists(keys.lease(MODEL)), "another one may be nearer to the store"
    store.away = False
    assert other.handle(4) is not None
    assert logprob_bytes(probe(other, world, 5)) == expected


def test_a_backend_of_no_further_use_ends_the_process_with_one_attempt_counted(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    expected = undisturbed(world, [0])
    worker = world.worker("a/1")
    worker.handle(0)
    for seq, op in enumerate(step(0), 1):
        world.admit(seq, op)

    def broken(*arguments: object) -> None:
        raise RuntimeError("a rank is gone")

    with monkeypatch.context() as group:
        group.setattr(worker.backend, "apply", broken)
        group.setattr(worker.backend, "close", broken)
        group.setattr(worker.backend, "_broken", True)
        with pytest.raises(Ended):
            worker.handle(1)
    assert [request_id for _, request_id, _ in worker.dispatched] == [f"{MODEL}:1", f"{MODEL}:2"]
    heir = world.worker("b/1")
    for seq in (1, 2):
        heir.handle(seq)
    assert world.client.hget(keys.op(f"{MODEL}:1"), "attempts") == b"1"
    assert logprob_bytes(probe(heir, world, 3)) == expected


def test_a_restore_that_breaks_the_backend_is_an_attempt_at_the_op_that_asked_for_it(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    first = world.worker("a/1")
    for seq, op in enumerate(step(0), 1):
        world.admit(seq, op)
    for seq in (0, 1):
        first.handle(seq)
    worker = world.worker("a/2")

    def broken(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as memory:
        memory.setattr(worker.backend, "apply", broken)
        for _ in range(2):
            with pytest.raises(Requeue, match="broke the backend"):
                worker.handle(2)
    assert world.client.hget(keys.op(f"{MODEL}:2"), "attempts") == b"2"
    stepped = worker.handle(2)
    assert stepped is not None and not stepped.failed
