"""Full fine-tuning by a worker: a dead run is restored bit for bit, and models alternate on a trainer of one."""

from __future__ import annotations

import pytest

from app import ids
from app.domain import ops as domain_ops
from app.domain.ops import CreateModel, ModelSpec, Op
from app.domain.records import Model
from app.stores.redis import keys
from app.stores.redis.records import dump
from tests.unit.workers.conftest import BASE, PROBE, Worker, World, await_true, logprob_bytes, step
from workers.backends.training.backends import create
from workers.backends.training.base import Create

ONE, OTHER = "session:train:7", "session:train:8"


@pytest.fixture
def world(world: World) -> World:
    """A world whose nodes "a" and "b" do full fine-tuning."""
    for node in ("full-a", "full-b"):
        if node not in world.backends:
            world.backends[node] = create(world.base, full=True)
            world.backends[node].open()
        for model_id in (ONE, OTHER):
            world.backends[node].close(model_id)
    for model_id in (ONE, OTHER):
        world.oplog.create_model(model_id, dump(Model("me", "session", BASE, 0.0, full=True)))
    return world


def run(world: World, worker: Worker, model_id: str, seq: int, op: Op) -> bytes:
    payload = domain_ops.encode(op)
    world.oplog.admit(model_id, seq, op.kind, payload, domain_ops.digest(payload))
    result = worker.runner.handle(ids.request_id(model_id, seq), model_id, op.kind)
    assert result is not None and not result.failed, result
    return result.body


def ops(*seeds: int) -> list[Op]:
    return [CreateModel(ModelSpec(BASE, None)), *(op for seed in seeds for op in step(seed)), PROBE]


def undisturbed(world: World, *seeds: int) -> bytes:
    backend = world.backends["full-a"]
    output = None
    for op in [Create(None), *ops(*seeds)[1:]]:
        output = backend.apply({"alone": op})["alone"]
    backend.close("alone")
    return output.logprobs.values.tobytes()


@pytest.mark.parametrize("successor", ["full-a/2", "full-b/1"])
def test_a_run_whose_trainer_dies_over_a_pending_gradient_ends_as_if_undisturbed(world: World, successor: str):
    """The first new worker has the dead one's disk, the second one only the object store."""
    calls = ops(1, 2, 3)
    first = world.worker("full-a/1", most=1, share=1.0)
    for seq, op in enumerate(calls[:6]):
        run(world, first, ONE, seq, op)
    await_true(lambda: int(world.client.hget(keys.model(ONE), "snapshot_seq") or 0) == 4, "no durable snapshot")
    first.parts.keeper.stop()
    world.oplog.release(ONE, "full-a/1")
    world.backends["full-a"].close(ONE)
    second = world.worker(successor, most=1)
    for seq, op in enumerate(calls[6:], 6):
        found = run(world, second, ONE, seq, op)
    assert logprob_bytes(found) == undisturbed(world, 1, 2, 3)


def test_two_models_take_turns_on_a_trainer_that_holds_one_and_end_as_if_alone(world: World):
    worker = world.worker("full-a/1", most=1)
    calls = {ONE: ops(1, 2), OTHER: ops(3, 4)}
    found = {}
    for seq in range(len(calls[ONE])):
        for model_id in (ONE, OTHER):
            found[model_id] = run(world, worker, model_id, seq, calls[model_id][seq])
            assert list(worker.owner.residents()) == [model_id]
            assert worker.backend.describe()["models"] == 1
    assert logprob_bytes(found[ONE]) == undisturbed(world, 1, 2)
    assert logprob_bytes(found[OTHER]) == undisturbed(world, 3, 4)
