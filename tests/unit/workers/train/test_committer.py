"""A save ends once, whatever fails meanwhile, and costs no other Op an attempt or a bit."""

from __future__ import annotations

import json
import threading

import pytest

from app.domain import records
from app.domain.ops import SaveWeights
from app.errors import NotFound, Requeue, Unavailable
from app.stores.objects.folder import FolderStore
from app.stores.redis import keys
from app.stores.redis.lifecycle import RedisLifecycle
from tests.unit.workers.conftest import (
    MODEL,
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
from workers.train import committer

__all__ = ["dispatch", "store"]  # the fixtures


def attempts(world: World, seq: int) -> int:
    """Attempts of an Op that no snapshot has replaced yet."""
    return int(world.client.hget(keys.op(f"{MODEL}:{seq}"), "attempts"))


@pytest.mark.parametrize("next_is", ["a tick", "another dispatch"])
def test_a_save_begun_in_order_delays_no_other_dispatch(
    world: World, store: GatedStore, dispatch: Dispatch, next_is: str
):
    """The dispatch of another model ends with its own Op; the next dispatch commits the save."""
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    add_model(world, OTHER)
    worker.runner.handle(f"{OTHER}:0", OTHER, "create_model")
    admit(world, *step(0))
    worker.handle(1)
    admit(world, SAVE, model_id=OTHER)
    ran = Ran(worker)
    assert dispatch(worker, 2, "optim_step").result() is not None
    assert ran.captured == 1, "it had its turn"
    assert applied(world, OTHER) == 0
    store.open.set()
    await_true(lambda: worker.owner.residents()[OTHER].is_due, "it is written")
    if next_is == "a tick":
        worker.runner.commit_saves()
    else:
        probe(worker, world, 3)
    assert applied(world, OTHER) == 1


def test_a_name_that_is_taken_fails_the_save_alone(world: World, store: GatedStore):
    store.open.set()
    worker = world.worker("a/1", store=store)
    admit(world, *step(0), SAVE, SAVE, *step(1))
    worker.handle(6)
    results = [world.oplog.outcome(f"{MODEL}:{seq}") for seq in (3, 4, 5, 6)]
    assert [bool(result and result.failed) for result in results] == [False, True, False, False]
    assert logprob_bytes(probe(worker, world, 7)) == undisturbed(world, [0, 1])


def test_a_store_that_is_away_costs_what_ran_ahead_no_attempt_and_no_bit(
    world: World, store: GatedStore, dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("workers.train.scheduler._FIRST_PAUSE_S", 0.0)
    worker = world.worker("a/1", store=store)
    admit(world, *step(0), SAVE, *step(1))
    ran = Ran(worker)
    dispatched = dispatch(worker, 3)
    await_true(lambda: ran.kinds.get(MODEL, []).count("optim_step") == 2, "a step ran ahead")
    store.error = Unavailable("the object store is away")
    store.open.set()
    with pytest.raises(Requeue, match="away"):
        dispatched.result()
    assert worker.owner.residents() == {}, "the state is ahead of the journal"
    before = len(ran.kinds[MODEL])
    for _ in range(4):  # more often than an Op has attempts
        with pytest.raises(Requeue, match="away"):
            worker.handle(5, "optim_step")
    replayed = ran.kinds[MODEL][before:]
    assert replayed == ["Create", "forward_backward", "optim_step"], "and behind a save that was put off nothing runs"
    store.error = None
    assert worker.handle(5, "optim_step") is not None
    assert [attempts(world, seq) for seq in (3, 4, 5)] == [0, 0, 0]
    assert logprob_bytes(probe(worker, world, 6)) == undisturbed(world, [0, 1])
    assert saved_files(world) == expected_files(world, [0])


@pytest.mark.parametrize("ahead", [False, True])
def test_a_lease_that_is_lost_meanwhile_costs_nothing_but_the_work(
    world: World, store: GatedStore, dispatch: Dispatch, ahead: bool
):
    worker = world.worker("a/1", store=store)
    admit(world, *step(0), SAVE)
    worker.handle(2)
    ran = Ran(worker)
    dispatched = dispatch(worker, 3)
    await_true(lambda: ran.captured == 1, "the save is under way")
    admit(world, *step(1), first=4)
    if ahead:
        await_true(lambda: ran.kinds.get(MODEL, [])[-1:] == ["optim_step"], "a step ran ahead")
    world.client.delete(keys.lease(MODEL))
    successor = world.worker("b/1")
    results = [successor.handle(seq) for seq in (3, 4, 5)]
    seen, files = world.head(), saved_files(world)
    store.open.set()
    with pytest.raises(Requeue):
        dispatched.result()
    assert world.head() == seen
    assert [world.oplog.outcome(f"{MODEL}:{seq}") for seq in (3, 4, 5)] == results
    assert saved_files(world) == files == expected_files(world, [0])
    assert logprob_bytes(probe(successor, world, 6)) == undisturbed(world, [0, 1])


@pytest.mark.parametrize(("in_time", "next_owner"), [(True, "b/1"), (False, "b/1"), (False, "a/2")])
def test_a_model_that_is_released_leaves_nothing_undone_and_no_attempt(
    world: World, store: GatedStore, dispatch: Dispatch, in_time: bool, next_owner: str
):
    worker = world.worker("a/1", store=store)
    admit(world, *step(0))
    worker.handle(2, "optim_step")
    admit(world, SAVE, *step(1), first=3)
    ran = Ran(worker)
    dispatched = dispatch(worker, 3)
    await_true(lambda: len(ran.kinds.get(MODEL, [])) == 2, "a step ran ahead")
    worker.runner.leave()
    with pytest.raises(Requeue, match="about to end"):
        dispatched.result()
    if in_time:
        threading.Timer(0.05, store.open.set).start()
    worker.drain.settle_and_release(120.0 if in_time else 0.5)
    assert applied(world) == (5 if in_time else 2)
    assert len(worker.dispatched) == (0 if in_time else 3), "what waits is dispatched"
    successor = world.worker(next_owner, store=FolderStore(world.folder / "objects", "secret", "http://x"))
    assert successor.handle(5, "optim_step") is not None
    if not in_time:  # else a snapshot has replaced them
        assert [attempts(world, seq) for seq in (3, 4, 5)] == [0, 0, 0]
    assert logprob_bytes(probe(successor, world, 6)) == undisturbed(world, [0, 1])


def test_a_save_that_breaks_is_given_up_after_its_attempts_and_nothing_else(world: World, store: GatedStore):
    worker = world.worker("a/1", store=store)
    store.open.set()
    store.error = RuntimeError("no such thing")
    admit(world, *step(0), SAVE, *step(1))
    for tried in range(3):
        with pytest.raises(Requeue, match="RuntimeError"):
            worker.handle(5, "optim_step")
        assert attempts(world, 3) == tried + 1
    assert worker.handle(5, "optim_step") is not None
    saved = world.oplog.outcome(f"{MODEL}:3")
    assert saved is not None and saved.failed and json.loads(saved.body)["category"] == "server"
    assert [attempts(world, seq) for seq in (4, 5)] == [0, 0]
    assert logprob_bytes(probe(worker, world, 6)) == undisturbed(world, [0, 1])


def test_a_save_whose_thread_cannot_start_is_tried_again(
    world: World, store: GatedStore, monkeypatch: pytest.MonkeyPatch
):
    store.open.set()
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    admit(world, SAVE)
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "save":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(Requeue, match="RuntimeError"):
            worker.handle(1, SAVE.kind)
    assert worker.runner._background_saves.running() == set(), "nothing waits for a save that never began"
    saved = worker.handle(1, SAVE.kind)
    assert saved is not None and not saved.failed


def test_so_many_saves_are_written_at_a_time_and_no_more(
    world: World, store: GatedStore, dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch
):
    """Each holds a copy of its model in memory."""
    monkeypatch.setattr(committer, "_MOST_SAVES", 1)
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    add_model(world, OTHER)
    worker.runner.handle(f"{OTHER}:0", OTHER, "create_model")
    admit(world, SAVE)
    admit(world, *step(0), SAVE, model_id=OTHER)
    ran = Ran(worker)
    dispatched = dispatch(worker, 1)
    await_true(lambda: applied(world, OTHER) == 2, "what is no save goes on")
    goes_on_waiting(worker, dispatched)
    assert ran.captured == 1
    store.open.set()
    assert dispatched.result() is not None
    assert worker.runner.handle(f"{OTHER}:3", OTHER, SAVE.kind) is not None


def test_an_abandoned_save_is_over_before_its_model_is_saved_anew(world: World, store: GatedStore, dispatch: Dispatch):
    """Both saves would write the same generation, and on a GPU a replayed state may have other bits."""
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    admit(world, SAVE, *step(0))
    ran = Ran(worker)
    dispatched = dispatch(worker, 1)
    await_true(lambda: ran.captured == 1, "the save is under way")
    lapsed = worker.owner.residents()[MODEL]
    worker.parts.keeper.drop(MODEL)  # as if the lease had expired: the same process restores the model
    await_true(lambda: worker.owner.residents().get(MODEL, lapsed) is not lapsed, "it was")
    goes_on_waiting(worker, dispatched)
    assert ran.captured == 1
    store.open.set()
    assert dispatched.result() is not None
    assert ran.captured == 2
    assert worker.handle(3, "optim_step") is not None
    assert logprob_bytes(probe(worker, world, 4)) == undisturbed(world, [0])


def test_a_model_that_is_deleted_in_mid_save_is_gone(world: World, store: GatedStore, dispatch: Dispatch):
    worker = world.worker("a/1", store=store)
    worker.handle(0, "create_model")
    admit(world, SAVE, *step(0))
    ran = Ran(worker)
    dispatched = dispatch(worker, 1)
    await_true(lambda: len(ran.kinds.get(MODEL, [])) == 2, "a step ran ahead")
    RedisLifecycle(world.client, world.settings).end_model(MODEL)
    world.records.delete(records.Model.namespace, MODEL)
    store.error = NotFound("no such model")
    store.open.set()
    ended = dispatched.result()
    assert ended is not None and "run has ended" in json.loads(ended.body)["error"]
    assert worker.owner.residents() == {}


def test_an_adapter_without_room_in_shared_memory_goes_the_same_way(
    world: World, store: GatedStore, dispatch: Dispatch
):
    worker = world.worker("a/1", store=store, handover_bytes=0)
    worker.handle(0, "create_model")
    admit(world, SaveWeights("sampler_weights", "x", sampling_session_id="session:sample:0"), *step(0))
    ran = Ran(worker)
    dispatched = dispatch(worker, 1)
    await_true(lambda: len(ran.kinds.get(MODEL, [])) == 2, "a step ran beside it")
    assert world.records.get(records.Sampler.namespace, "session:sample:0") is None
    store.open.set()
    assert dispatched.result() is not None
    assert world.records.get(records.Sampler.namespace, "session:sample:0") is not None
