"""A model that takes no step does not keep all its calls: it is snapshotted once no gradient is pending."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from app.domain.ops import Op
from app.stores.redis import keys
from tests.property.vector_backend import POISON, backward, optim_step
from tests.property.world import CREATE, MODEL, Process, TrainerWorld

MOST = 4
FORWARD, BAD = backward(1, forward_only=True), backward(1, POISON, forward_only=True)


@pytest.fixture
def world(client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerWorld]:
    monkeypatch.setattr("workers.checkpoints.snapshots._MOST_OPS", MOST)
    world = TrainerWorld(client, tmp_path)
    yield world
    world.stop()


def run(world: TrainerWorld, trainer: Process, *ops: Op) -> None:
    first = int(world.client.hget(keys.model(MODEL), "applied")) + 1
    for seq, op in enumerate(ops, first):
        world.admit(seq, op)
        assert trainer.send(seq, op.kind) is not None


def snapshot_seq(world: TrainerWorld) -> int:
    return int(world.client.hget(keys.model(MODEL), "snapshot_seq"))


@pytest.mark.parametrize("call", [FORWARD, BAD], ids=["forwards", "calls that fail"])
def test_a_model_that_takes_no_step_keeps_few_of_its_calls(world: TrainerWorld, call: Op):
    trainer = world.trainer("a")
    run(world, trainer, CREATE, *[call] * (3 * MOST))
    assert snapshot_seq(world) >= 2 * MOST
    assert world.client.zcard(keys.journal(MODEL)) <= MOST + 1


def test_no_snapshot_is_taken_while_gradients_are_pending(world: TrainerWorld):
    trainer = world.trainer("a")
    run(world, trainer, CREATE, backward(1), *[FORWARD] * (3 * MOST))
    assert snapshot_seq(world) == -1
    run(world, trainer, optim_step())
    assert world.client.zcard(keys.journal(MODEL)) <= 1


def test_the_state_behind_such_a_snapshot_has_the_same_bits(world: TrainerWorld):
    first = world.trainer("a")
    run(world, first, CREATE, backward(1), optim_step(), *[FORWARD] * (3 * MOST), backward(2))
    before = first.backend.states[MODEL]
    world.lapse()
    other = world.trainer("b")
    run(world, other, FORWARD)
    after = other.backend.states[MODEL]
    assert (after.weight, after.moment, after.gradient) == (before.weight, before.moment, before.gradient)
