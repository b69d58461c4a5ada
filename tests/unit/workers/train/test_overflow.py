"""A step whose weights are not finite fails, and the model goes on as it was before the step."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from app.domain.ops import Op, OptimStep
from app.domain.results import OptimStepOutput
from app.errors import Requeue
from app.stores.redis import keys
from tests.unit.workers.conftest import BASE, MODEL, Worker, World, await_true, logprob_bytes, probe, step, undisturbed
from tests.unit.workers.train.saves import (
    SAVE,
    Dispatch,
    GatedStore,
    Ran,
    admit,
    dispatch,
    expected_files,
    saved_files,
    store,
)
from tests.unit.workers.train.test_scheduler import A, B, C
from tests.unit.workers.train.test_scheduler import admit as admit_of
from tests.unit.workers.train.test_scheduler import handle as handle_of
from tests.unit.workers.train.test_shared_steps import merging, state, trained
from workers.backends.training import trainer

__all__ = ["dispatch", "merging", "store"]  # the fixtures
_, STEP = step()
assert isinstance(STEP, OptimStep)
TOO_FAR = OptimStep(replace(STEP.params, learning_rate=1e20))


def failures(world: World, *seqs: int) -> list[bool]:
    results = [world.oplog.outcome(f"{MODEL}:{seq}") for seq in seqs]
    return [result is not None and result.failed for result in results]


def test_a_step_that_overflows_fails_with_its_rate_and_leaves_the_weights_and_the_optimizer(world: World):
    worker = world.worker("a/1")
    admit(world, *step(0), step(5)[0], TOO_FAR, *step(1))
    result = worker.handle(4, "optim_step")
    assert result is not None and result.failed
    error = json.loads(result.body)
    assert error["category"] == "user" and "learning_rate 1e+20; no step was taken" in error["error"]
    assert worker.owner.residents() == {}, "the state is spoiled"
    worker.handle(6, "optim_step")
    assert failures(world, 5, 6) == [False, False]
    assert logprob_bytes(probe(worker, world, 7)) == undisturbed(world, [0, 1]), "the failed step dropped its gradient"


@pytest.mark.parametrize("share", [0.02, 1.0], ids=["from the journal", "from a snapshot"])
def test_a_new_owner_does_not_repeat_the_step(world: World, share: float):
    worker = world.worker("a/1", share=share)
    admit(world, *step(0), step(5)[0], TOO_FAR)
    worker.handle(4, "optim_step")
    world.client.delete(keys.lease(MODEL))
    successor = world.worker("a/2", share=share)
    admit(world, *step(1), first=5)
    successor.handle(6, "optim_step")
    assert logprob_bytes(probe(successor, world, 7)) == undisturbed(world, [0, 1])


@pytest.mark.parametrize("was_committed", [False, True])
def test_the_failure_is_the_same_after_a_commit_in_doubt(
    world: World, monkeypatch: pytest.MonkeyPatch, was_committed: bool
):
    worker = world.worker("a/1")
    admit(world, *step(0), step(5)[0], TOO_FAR, *step(1))
    worker.handle(3)
    commit = world.oplog.commit

    def lost(*arguments: Any) -> None:
        if was_committed:
            commit(*arguments)
        raise redis.ConnectionError("the connection is lost")

    with monkeypatch.context() as patch:
        patch.setattr(world.oplog, "commit", lost)
        with pytest.raises(Requeue, match="may or may not have happened"):
            worker.handle(4, "optim_step")
    successor = world.worker("a/2")
    successor.handle(6, "optim_step")
    assert failures(world, 4, 5, 6) == [True, False, False]
    assert logprob_bytes(probe(successor, world, 7)) == undisturbed(world, [0, 1])


def test_a_step_that_ran_ahead_of_a_save_is_committed_behind_it(world: World, store: GatedStore, dispatch: Dispatch):
    worker = world.worker("a/1", store=store)
    admit(world, *step(0), SAVE, TOO_FAR, *step(1))
    ran = Ran(worker)
    dispatched = dispatch(worker, 6)
    await_true(lambda: ran.kinds.get(MODEL, [])[-1:] == ["drop_gradients"], "the step ran ahead, and failed")
    assert not dispatched.done()
    store.open.set()
    result = dispatched.result()
    assert result is not None and not result.failed
    assert ran.kinds[MODEL].count("Create") == 2, "the model was restored"
    assert failures(world, 3, 4, 5, 6) == [False, True, False, False]
    attempts = [int(world.client.hget(keys.op(f"{MODEL}:{seq}"), "attempts") or 0) for seq in (4, 5, 6)]
    assert attempts == [0, 0, 0]
    assert logprob_bytes(probe(worker, world, 7)) == undisturbed(world, [0, 1])
    assert saved_files(world) == expected_files(world, [0])


def drained(world: World, store: GatedStore, dispatch: Dispatch, *later: Op) -> tuple[Worker, Ran]:
    """A trainer that has ended, and what it ran: the step was settled while it waited for a save. The Ops `later` came
    once the step had run."""
    worker = world.worker("a/1", store=store)
    admit(world, *step(0), SAVE, TOO_FAR)
    ran = Ran(worker)
    dispatched = dispatch(worker, 3)
    await_true(lambda: ran.kinds.get(MODEL, [])[-1:] == ["drop_gradients"], "the step ran ahead, and failed")
    admit(world, *later, first=5)
    worker.runner.leave()
    with pytest.raises(Requeue, match="about to end"):
        dispatched.result()
    threading.Timer(0.05, store.open.set).start()
    worker.dispatched.clear()
    worker.drain.settle_and_release(60.0)
    return worker, ran


def test_no_snapshot_is_taken_of_a_spoiled_state(world: World, store: GatedStore, dispatch: Dispatch):
    _, ran = drained(world, store, dispatch)
    assert (failures(world, 4), ran.captured) == ([True], 1), "of the save alone"
    assert logprob_bytes(probe(world.worker("b/1"), world, 5)) == undisturbed(world, [0])


def test_a_trainer_that_ends_dispatches_the_calls_behind_the_step(world: World, store: GatedStore, dispatch: Dispatch):
    worker, _ = drained(world, store, dispatch, *step(1))
    shared = f"train.{BASE}"
    assert worker.dispatched == [("forward_backward", f"{MODEL}:5", shared), ("optim_step", f"{MODEL}:6", shared)]


def test_models_whose_steps_shared_the_call_keep_their_states(world: World, merging: Worker, tmp_path: Path):
    recorder = trained(world, merging)
    for model_id in (A, B, C):
        admit_of(world, model_id, 2, TOO_FAR if model_id == B else STEP)
    held = merging.owner.residents()
    for model_id in (A, B, C):
        result = handle_of(merging, model_id, 2, "optim_step")
        assert result is not None and result.failed == (model_id == B)
    assert recorder.passes[0] == {A, B, C}
    for model_id, is_kept in ((A, True), (B, False), (C, True)):
        assert (merging.owner.resident(model_id) is held[model_id]) == is_kept
    live = [state(merging, model_id, tmp_path / f"live {at}") for at, model_id in enumerate((A, C))]
    merging.owner.discard_all()
    for model_id in (A, B, C):
        merging.owner.own(model_id)
    assert live == [state(merging, model_id, tmp_path / f"replayed {at}") for at, model_id in enumerate((A, C))]


def test_a_step_that_an_earlier_version_committed_is_replayed(world: World, monkeypatch: pytest.MonkeyPatch):
    worker = world.worker("a/1")
    admit(world, step(5)[0], TOO_FAR, *step(0))
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_overflow", lambda metrics: OptimStepOutput({"grad_norm": 0.0}))
        worker.handle(2, "optim_step")
    worker.owner.discard(MODEL)
    worker.handle(4, "optim_step")
    assert failures(world, 2, 3, 4) == [False, True, True], "the weights are what they were"
