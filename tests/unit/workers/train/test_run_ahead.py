"""Ops run ahead while a save is written. Content and order of each commit stay as without the save."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from app.domain.ops import LoadWeights, SaveWeights
from app.domain.records import Checkpoint
from app.errors import Requeue, Unavailable
from app.stores.redis import keys
from app.stores.redis.records import load
from app.stores.redis.types import Lease
from tests.unit.workers.conftest import (
    MODEL,
    PROBE,
    World,
    add_model,
    await_true,
    logprob_bytes,
    probe,
    step,
    undisturbed,
)
from tests.unit.workers.train.saves import (
    OTHER,
    SAVE,
    Dispatch,
    GatedStore,
    Ran,
    admit,
    applied,
    dispatch,
    expected_files,
    goes_on_waiting,
    saved_files,
    store,
)
from tests.unit.workers.train.test_scheduler import MERGED, infinite_ratio
from workers.train import committer, scheduler

__all__ = ["dispatch", "store"]  # the fixtures


def test_the_next_ops_run_while_a_save_is_written_and_are_committed_behind_it(
    world: World, store: GatedStore, dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch
):
    worker = world.worker("a/1", store=store)
    admit(world, *step(0), SAVE)
    worker.handle(2)
    ran, commits = Ran(worker), []
    commit = world.oplog.commit

    def noted(lease: Lease, seq: int, *rest: Any) -> None:
        commits.append(seq)
        commit(lease, seq, *rest)

    monkeypatch.setattr(world.oplog, "commit", noted)
    dispatched = dispatch(worker, 3)
    admit(world, *step(1), PROBE, first=4)
    await_true(lambda: ran.kinds.get(MODEL, [])[-1:] == ["forward"], "three Ops ran beside the save")
    assert applied(world) == 2
    assert [world.oplog.outcome(f"{MODEL}:{seq}") for seq in (3, 4, 5, 6)] == [None] * 4, "nothing is readable yet"
    assert not dispatched.done(), "the dispatch of a save ends when the save is terminal"
    store.open.set()
    saved = dispatched.result()
    assert saved is not None and not saved.failed
    assert commits == [3, 4, 5, 6]
    assert ran.kinds[MODEL] == ["forward_backward", "optim_step", "forward"], "each once"
    looked = worker.handle(6)
    assert looked is not None and logprob_bytes(looked.body) == undisturbed(world, [0, 1])
    assert saved_files(world) == expected_files(world, [0]), "the save holds what was there before it"


def test_other_models_run_and_commit_while_a_save_is_written(world: World, store: GatedStore, dispatch: Dispatch):
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    add_model(world, OTHER)
    worker.runner.handle(f"{OTHER}:0", OTHER, "create_model")
    admit(world, SAVE)
    dispatched = dispatch(worker, 1)
    admit(world, *step(0), *step(1), *step(2), model_id=OTHER)
    await_true(lambda: applied(world, OTHER) == 6, "the other model went on without a dispatch of its own")
    assert not dispatched.done()
    store.open.set()
    assert dispatched.result() is not None


class Clock:
    """The time of the scheduler's pauses, which a test sets forward."""

    def __init__(self) -> None:
        self.forward_s, self.sleep = 0.0, time.sleep
        self._began = time.monotonic()

    def monotonic(self) -> float:
        return self._began + self.forward_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(scheduler, "time", clock)
    return clock


def test_a_model_that_was_put_off_is_retried_while_another_one_waits_for_its_save(
    world: World, store: GatedStore, dispatch: Dispatch, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    """After each pause once, and not in a tight loop."""
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    add_model(world, OTHER)
    worker.runner.handle(f"{OTHER}:0", OTHER, "create_model")
    worker.owner.discard(OTHER)
    restore, tries = worker.owner._restore, list[str]()

    def away_twice(lease: Lease) -> Any:
        tries.append(lease.model_id)
        if len(tries) <= 2:
            raise Unavailable("the object store is away")
        return restore(lease)

    monkeypatch.setattr(worker.owner, "_restore", away_twice)
    admit(world, *step(0), model_id=OTHER)
    with pytest.raises(Requeue, match="away"):
        worker.runner.handle(f"{OTHER}:1", OTHER, "forward_backward")
    admit(world, SAVE, SaveWeights("weights", "second"))
    dispatched = dispatch(worker, 2)
    assert store.asked.wait(60)
    goes_on_waiting(worker, dispatched)
    assert len(tries) == 1
    clock.forward_s += 2.0
    await_true(lambda: len(tries) == 2, "its first pause is over")
    goes_on_waiting(worker, dispatched)
    assert len(tries) == 2, "its second pause is not"
    clock.forward_s += 4.0
    await_true(lambda: applied(world, OTHER) == 2, "it goes on")
    assert not dispatched.done()
    store.open.set()
    assert dispatched.result() is not None


def test_nothing_runs_ahead_of_a_save_that_was_put_off_however_long_it_takes(
    world: World, store: GatedStore, dispatch: Dispatch, clock: Clock
):
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    admit(world, SAVE)
    store.error = Unavailable("the object store is away")
    store.open.set()
    with pytest.raises(Requeue, match="away"):
        worker.handle(1, SAVE.kind)
    store.open.clear()
    store.error = None
    admit(world, *step(0), first=2)
    clock.forward_s += 1000.0
    ran = Ran(worker)
    dispatched = dispatch(worker, 1)
    await_true(lambda: ran.captured == 1, "the save is under way again")
    goes_on_waiting(worker, dispatched)
    assert MODEL not in ran.kinds
    store.open.set()
    assert dispatched.result() is not None


def test_what_broke_a_worker_never_runs_ahead(world: World, store: GatedStore, dispatch: Dispatch):
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    admit(world, SAVE, *step(0))
    world.client.hset(keys.op(f"{MODEL}:2"), "attempts", 1)
    ran = Ran(worker)
    dispatched = dispatch(worker, 1)
    await_true(lambda: ran.captured == 1, "the save is under way")
    goes_on_waiting(worker, dispatched)
    assert MODEL not in ran.kinds
    store.open.set()
    assert dispatched.result() is not None
    assert worker.handle(3, "optim_step") is not None
    assert logprob_bytes(probe(worker, world, 4)) == undisturbed(world, [0])


def test_nothing_runs_beside_a_save_that_broke_a_worker(world: World, store: GatedStore, dispatch: Dispatch):
    """If the save breaks the worker again, it harms no other Op."""
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    add_model(world, OTHER)
    worker.runner.handle(f"{OTHER}:0", OTHER, "create_model")
    admit(world, SAVE, *step(0))
    world.client.hset(keys.op(f"{MODEL}:1"), "attempts", 1)
    admit(world, *step(0), model_id=OTHER)
    worker.owner.residents()[OTHER].served += 3600  # the turn of OTHER comes after the save
    ran = Ran(worker)
    dispatched = dispatch(worker, 1)
    await_true(lambda: ran.captured == 1, "the save is under way")
    with pytest.raises(TimeoutError):
        dispatched.result(timeout=0.3)
    assert ran.kinds == {}
    store.open.set()
    assert dispatched.result() is not None


def test_such_a_save_gives_the_trainer_back_when_its_upload_hangs(
    world: World, store: GatedStore, dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(committer, "_ALONE_S", 0.1)
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    add_model(world, OTHER)
    worker.runner.handle(f"{OTHER}:0", OTHER, "create_model")
    admit(world, SAVE)
    world.client.hset(keys.op(f"{MODEL}:1"), "attempts", 1)
    dispatched = dispatch(worker, 1)
    assert store.asked.wait(60)
    admit(world, *step(0), model_id=OTHER)
    await_true(lambda: applied(world, OTHER) == 2, "the other model goes on")
    assert not dispatched.done()
    store.open.set()
    assert dispatched.result() is not None


def test_what_fails_ahead_dooms_what_waits_as_it_would_have(world: World, store: GatedStore, dispatch: Dispatch):
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    good, optim_step = step(1)
    admit(world, SAVE, infinite_ratio(), good, optim_step, *step(0))
    ran = Ran(worker)
    dispatched = dispatch(worker, 1)
    await_true(lambda: MODEL in ran.kinds, "the first ran ahead")
    goes_on_waiting(worker, dispatched)
    assert ran.kinds[MODEL] == ["forward_backward"], "nothing runs behind a failure whose commit has to come first"
    store.open.set()
    assert dispatched.result() is not None
    worker.handle(6, "optim_step")
    results = [world.oplog.outcome(f"{MODEL}:{seq}") for seq in range(2, 7)]
    assert [bool(result and result.failed) for result in results] == [True, True, True, False, False]
    assert logprob_bytes(probe(worker, world, 7)) == undisturbed(world, [0])


def test_what_may_not_run_ahead_shares_no_pass_of_another_model(world: World, store: GatedStore, dispatch: Dispatch):
    worker = world.worker("a/1", store=store, merged_tokens=MERGED)
    worker.handle(0, "create_model")
    add_model(world, OTHER)
    worker.runner.handle(f"{OTHER}:0", OTHER, "create_model")
    admit(world, SAVE, infinite_ratio(), step(1)[0])
    ran = Ran(worker)
    dispatched = dispatch(worker, 1)
    await_true(lambda: MODEL in ran.kinds, "the first ran ahead")
    admit(world, step(0)[0], model_id=OTHER)
    await_true(lambda: applied(world, OTHER) == 1, "the other model goes on")
    assert ran.kinds[MODEL] == ["forward_backward"], "nothing runs behind a failure whose commit has to come first"
    store.open.set()
    assert dispatched.result() is not None


@pytest.mark.parametrize("kind", ["load_weights", "save_weights"])
def test_a_load_and_another_save_wait_for_the_save_before(
    world: World, store: GatedStore, dispatch: Dispatch, kind: str
):
    worker = world.worker("a/1", store=store)
    admit(world, *step(0), SAVE, *step(1))
    store.open.set()
    worker.handle(5, "optim_step")
    store.open.clear()
    stored = world.records.get(Checkpoint.namespace, f"tinker://{MODEL}/weights/kept")
    assert stored is not None
    prefix = load(Checkpoint, stored).prefix
    loading = LoadWeights(f"tinker://{MODEL}/weights/kept", optimizer=True, prefix=prefix)
    second = SaveWeights("weights", "second") if kind == SAVE.kind else loading
    admit(world, SaveWeights("weights", "first"), PROBE, second, first=6)
    ran = Ran(worker)
    dispatched = dispatch(worker, 8, kind)
    await_true(lambda: ran.kinds.get(MODEL) == ["forward"], "the probe ran ahead")
    goes_on_waiting(worker, dispatched)
    assert ran.kinds[MODEL] == ["forward"] and ran.captured == 1
    store.open.set()
    assert dispatched.result() is not None
    steps = [0, 1] if kind == SAVE.kind else [0]
    assert logprob_bytes(probe(worker, world, 9)) == undisturbed(world, steps)


def test_no_snapshot_is_taken_of_a_state_that_ran_ahead_of_its_commits(
    world: World, store: GatedStore, dispatch: Dispatch
):
    """A snapshot of two steps with the seq of the first one would run the second step twice."""
    worker = world.worker("a/1", share=math.inf, store=store)
    worker.handle(0, "create_model")
    admit(world, SAVE, *step(0), *step(1), step(2)[0])
    ran = Ran(worker)
    dispatched = dispatch(worker, 1)
    await_true(lambda: len(ran.kinds.get(MODEL, [])) == 5, "all ran ahead")
    captured = ran.captured
    store.open.set()
    dispatched.result()
    assert applied(world) == 6
    assert ran.captured == captured
    admit(world, step(2)[1], first=7)
    worker.handle(7, "optim_step")
    assert ran.captured == captured + 1, "it waited for the next step"
    world.await_snapshot(7)
    world.client.delete(keys.lease(MODEL))
    assert logprob_bytes(probe(world.worker("b/1"), world, 8)) == undisturbed(world, [0, 1, 2])


def test_a_batch_sent_again_ahead_stands_in_for_the_refused_one(world: World, store: GatedStore, dispatch: Dispatch):
    """The missing gradients of the next step are known up to the Ops that have run, committed or not."""
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    world.oplog.refuse(MODEL, 1, "too long", "lost_batch")
    admit(world, SAVE, *step(0), first=2)
    ran = Ran(worker)
    dispatched = dispatch(worker, 2)
    await_true(lambda: ran.kinds.get(MODEL) == ["forward_backward", "optim_step"], "a step ran ahead")
    store.open.set()
    assert dispatched.result() is not None
    stepped = worker.handle(4, "optim_step")
    assert stepped is not None and not stepped.failed
    assert logprob_bytes(probe(worker, world, 5)) == undisturbed(world, [0])


def test_only_so_many_ops_run_ahead(
    world: World, store: GatedStore, dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("workers.train.scheduler._MOST_AHEAD", 2)
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    admit(world, SAVE, PROBE, PROBE, PROBE)
    ran = Ran(worker)
    dispatched = dispatch(worker, 1)
    await_true(lambda: ran.kinds.get(MODEL) == ["forward"] * 2, "two ran")
    goes_on_waiting(worker, dispatched)
    assert ran.kinds[MODEL] == ["forward"] * 2
    store.open.set()
    assert dispatched.result() is not None
