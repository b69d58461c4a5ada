"""A model that takes no step does not keep all its calls: it is snapshotted with its pending gradients."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from app.domain.ops import Op
from app.domain.records import READS_GRADIENTS, Worker
from app.domain.results import Result
from app.stores.redis import keys
from app.stores.redis.records import RedisRecords, dump
from tests.property.vector_backend import POISON, backward, optim_step
from tests.property.world import CREATE, MODEL, Process, TrainerWorld
from workers.checkpoints.transfer import read_manifest

MOST = 4
FORWARD, BAD = backward(1, forward_only=True), backward(1, POISON, forward_only=True)


@pytest.fixture
def world(client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerWorld]:
    monkeypatch.setattr("workers.checkpoints.snapshots._MOST_OPS", 2 * MOST)
    monkeypatch.setattr("workers.checkpoints.snapshots._MOST_PASSES", MOST)
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
    run(world, trainer, CREATE, *[call] * (6 * MOST))
    assert snapshot_seq(world) >= 4 * MOST
    assert world.client.zcard(keys.journal(MODEL)) <= 2 * MOST + 1


def test_a_model_that_only_adds_gradients_keeps_few_passes_to_run_again(world: TrainerWorld):
    trainer = world.trainer("a")
    run(world, trainer, CREATE, *map(backward, range(5 * MOST)))
    assert snapshot_seq(world) >= 4 * MOST
    assert world.client.zcard(keys.journal(MODEL)) <= MOST + 1


@pytest.mark.parametrize("node", ["a", "b"], ids=["from this machine", "from the object store"])
@pytest.mark.parametrize("rest", range(MOST), ids=lambda rest: f"{rest} behind the snapshot")
def test_the_next_owner_has_the_pending_gradients_to_the_bit(world: TrainerWorld, node: str, rest: int):
    world.noise = random.Random(0)  # a batch that runs again has another gradient
    first = world.trainer("a")
    run(world, first, CREATE, backward(1), optim_step(), *map(backward, range(MOST + rest)))
    before = copy.deepcopy(first.backend.states[MODEL])
    world.noise = None
    world.lapse()
    other = world.trainer(node)
    run(world, other, FORWARD)
    assert other.backend.states[MODEL].pending == before.pending
    if not rest:
        assert other.backend.states[MODEL] == before
    run(world, other, optim_step())
    assert other.backend.states[MODEL].steps[-1] == before.pending


def test_the_next_owner_knows_which_gradient_is_missing(world: TrainerWorld):
    first = world.trainer("a")
    run(world, first, CREATE, backward(1), backward(2, POISON), *map(backward, range(MOST)))
    assert snapshot_seq(world) > 2
    world.lapse()
    result = step_of(world, world.trainer("b"))
    assert result.failed and b"a gradient it needs is missing" in result.body
    again = step_of(world, world.trainer("b"))
    assert not again.failed


def test_an_earlier_version_does_not_take_such_a_snapshot_for_one_without_gradients(world: TrainerWorld):
    run(world, world.trainer("a"), CREATE, *map(backward, range(MOST)))
    prefix = world.client.hget(keys.model(MODEL), "snapshot").decode()
    assert read_manifest(world.store, prefix).schema_version == 2
    run(world, world.trainer("a"), optim_step())
    prefix = world.client.hget(keys.model(MODEL), "snapshot").decode()
    assert read_manifest(world.store, prefix).schema_version == 1


def test_beside_a_trainer_of_an_earlier_version_no_snapshot_holds_gradients(world: TrainerWorld):
    trainer = world.trainer("a")
    records = RedisRecords(world.client)
    earlier, same = (Worker("trainer", "base", {}, facts, "", 0.0) for facts in ({}, {READS_GRADIENTS: True}))
    records.put(Worker.namespace, "same", dump(same))
    records.put(Worker.namespace, "earlier", dump(earlier))
    run(world, trainer, CREATE, *map(backward, range(3 * MOST)))
    assert snapshot_seq(world) == -1
    run(world, trainer, optim_step())
    assert snapshot_seq(world) == 3 * MOST + 1, "a step leaves no gradients"
    run(world, trainer, *[FORWARD] * (3 * MOST))
    assert snapshot_seq(world) > 3 * MOST + 1, "nor do forwards"
    records.delete(Worker.namespace, "earlier")
    before = snapshot_seq(world)
    run(world, trainer, *map(backward, range(MOST)))
    assert snapshot_seq(world) > before
    prefix = world.client.hget(keys.model(MODEL), "snapshot").decode()
    assert read_manifest(world.store, prefix).schema_version == 2


def step_of(world: TrainerWorld, trainer: Process) -> Result:
    seq = int(world.client.hget(keys.model(MODEL), "applied")) + 1
    world.admit(seq, optim_step())
    result = trainer.send(seq, "optim_step")
    assert result is not None
    return result
