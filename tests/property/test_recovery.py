"""Scripted cases that random runs reach too seldom. The backend is noisy, so that a missing guard cannot hide."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from app.domain.ops import Op
from app.domain.results import Result
from app.stores.redis import keys
from tests.property.faults import Fault
from tests.property.vector_backend import BREAKING, POISON, State, backward, optim_step
from tests.property.world import CREATE, MODEL, Process, TrainerWorld
from workers.train.owner import MAX_ATTEMPTS


@pytest.fixture
def world(client: redis.Redis, tmp_path: Path) -> Iterator[TrainerWorld]:
    world = TrainerWorld(client, tmp_path, random.Random(2))
    world.admit(0, CREATE)
    yield world
    world.stop()


def run(world: TrainerWorld, trainer: Process, ops: list[Op]) -> list[Result | None]:
    """Runs the Ops; each is admitted only after the previous one has its result."""
    first = max(1, world.applied() + 1)
    for seq, op in enumerate(ops, first):
        world.admit(seq, op)
        for _ in range(MAX_ATTEMPTS + 1):
            trainer.send(seq)
    return [world.result(seq) for seq in range(first, first + len(ops))]


def failures(found: list[Result | None]) -> list[bool]:
    assert all(result is not None for result in found)
    return [result.failed for result in found if result is not None]


def state(trainer: Process) -> State:
    return trainer.backend.states[MODEL]


@pytest.mark.parametrize("fault", [Fault.LOST_BEFORE, Fault.LOST_AFTER])
def test_a_state_whose_commit_is_in_doubt_is_never_used_again(world: TrainerWorld, fault: Fault):
    trainer = world.trainer("a")
    trainer.send(0)
    world.admit(1, backward(1))
    trainer.faults.plan(fault, "oplog.commit")
    trainer.send(1)
    assert world.hit[fault] == 1
    for _ in range(2):
        trainer.send(1)
    assert failures(run(world, trainer, [optim_step()])) == [False]
    assert state(trainer).steps == [[1]]


def test_no_step_runs_behind_a_batch_that_failed_even_when_another_came(world: TrainerWorld):
    trainer = world.trainer("a")
    ops = [backward(1), backward(2, POISON), backward(3), optim_step(), backward(4), optim_step()]
    assert failures(run(world, trainer, ops)) == [False, True, False, True, False, False]
    assert state(trainer).steps == [[4]]


def test_a_refused_batch_may_be_sent_again_only_if_nothing_was_added_before_it(world: TrainerWorld):
    trainer = world.trainer("a")
    world.oplog.refuse(MODEL, 1, "too long", "lost_batch")
    for seq, op in ((2, backward(2)), (3, optim_step()), (4, backward(4))):
        world.admit(seq, op)
    trainer.send(4)
    world.oplog.refuse(MODEL, 5, "too long", "lost_batch")
    for seq, op in ((6, backward(6)), (7, optim_step())):
        world.admit(seq, op)
    trainer.send(7)
    assert failures([world.result(seq) for seq in (2, 3, 4, 6, 7)]) == [False, False, False, False, True]
    assert state(trainer).steps == [[2]]


def test_an_op_that_always_breaks_its_worker_is_given_up(world: TrainerWorld):
    trainer = world.trainer("a")
    assert failures(run(world, trainer, [backward(1, BREAKING), backward(2), optim_step()])) == [True, False, True]
    assert failures(run(world, trainer, [backward(4), optim_step()])) == [False, False]
    assert state(trainer).steps == [[4]]


def test_an_op_that_always_kills_its_worker_is_given_up(world: TrainerWorld):
    world.admit(1, backward(1))
    world.trainer("a").send(0)
    for _ in range(MAX_ATTEMPTS):
        doomed = world.trainer("a")
        doomed.faults.plan(Fault.DIES_BEFORE, "oplog.commit")
        doomed.send(1)
        assert doomed.faults.dead
    trainer = world.trainer("a")
    trainer.send(1)
    assert failures([world.result(1)]) == [True]
    assert failures(run(world, trainer, [optim_step(), backward(3), optim_step()])) == [True, False, False]
    assert state(trainer).steps == [[3]]


def test_an_op_that_never_ran_here_is_not_held_against_it_however_often_workers_change(world: TrainerWorld):
    for seq in range(1, 2 * MAX_ATTEMPTS):
        world.admit(seq, backward(seq))
        world.trainer("a").send(seq)
    assert not any(failures([world.result(seq) for seq in range(1, 2 * MAX_ATTEMPTS)]))


def test_a_state_beside_a_device_error_is_thrown_away(world: TrainerWorld):
    """The backend corrupts all states it holds when a device fails."""
    trainer = world.trainer("a")
    run(world, trainer, [backward(1), backward(2, BREAKING), optim_step(), backward(4), optim_step()])
    assert state(trainer).steps == [[4]]
    assert state(trainer).weight == state(trainer).weight, "not a number"


def test_what_failed_has_no_effect_in_a_replay_either(world: TrainerWorld):
    first = world.trainer("a", snapshots=False)
    first.send(0)
    for seq, op in ((1, backward(1)), (3, backward(3)), (4, optim_step()), (5, backward(5)), (6, backward(6))):
        world.admit(seq, op)
    world.oplog.refuse(MODEL, 2, "never came", "drop_gradients")
    first.send(6)
    world.lapse()
    successor = world.trainer("b")
    successor.send(6)
    assert state(successor) == State(4, state(successor).weight, gradient=state(successor).gradient, pending=[5, 6])


@pytest.mark.parametrize("killed", [False, True])
def test_a_step_without_its_gradients_names_the_same_reason_after_a_kill(world: TrainerWorld, killed: bool):
    for seq, op in ((2, backward(2)), (3, optim_step())):
        world.admit(seq, op)
    world.oplog.refuse(MODEL, 1, "too long", "lost_batch")
    trainer = world.trainer("a")
    trainer.send(2)
    if killed:
        world.lapse()
        trainer = world.trainer("b")
    stepped = trainer.send(3)
    assert stepped is not None and b"is missing (too long);" in stepped.body


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_new_process_goes_on_from_the_newest_snapshot_here_or_in_the_store(world: TrainerWorld, node: str):
    first = world.trainer("a")
    run(world, first, [backward(1), optim_step(), backward(3)])
    weight, moment = state(first).weight, state(first).moment
    world.lapse()
    successor = world.trainer(node)
    successor.send(3)
    assert (state(successor).weight, state(successor).moment) == (weight, moment), (
        "with noise a replayed step would differ"
    )
    assert state(successor).pending == [3]


def test_a_snapshot_that_comes_late_moves_nothing_back(world: TrainerWorld):
    slow, quick = world.trainer("a"), world.trainer("b")
    slow.background.lags = True
    run(world, slow, [backward(1), optim_step()])
    world.lapse()
    run(world, quick, [backward(3), optim_step(), backward(5)])
    head = world.client.hgetall(keys.model(MODEL))
    slow.background.catch_up()
    assert world.client.hgetall(keys.model(MODEL)) == head
    world.lapse()
    successor = world.trainer("b")
    successor.send(5)
    assert (state(successor).steps, state(successor).pending) == ([[1], [3]], [5])
