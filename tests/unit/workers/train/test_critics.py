"""Critics through journal, runner, snapshots and checkpoints."""

from __future__ import annotations

from dataclasses import replace

from app import ids
from app.domain import ops
from app.domain.ops import AdamParams, CreateModel, ForwardBackward, LoraSpec, ModelSpec, Op, OptimStep, SaveWeights
from app.domain.records import Checkpoint, Model
from app.domain.results import CriticOutput, Result
from app.stores.redis import keys
from app.stores.redis.records import dump, load
from app.wire import tinker_pb2 as pb
from tests.parity.datums import batch, valued
from tests.unit.workers.conftest import BASE, Worker, World, await_true
from workers.backends.training.base import Create

CRITIC, RESUMED = "session:train:7", "session:train:8"
SPEC = ModelSpec(BASE, LoraSpec(rank=4, train_unembed=False, seed=3), critic=True)
PROBE = ForwardBackward(batch(valued(99, (9, 4))), "ppo_critic", {"value_clip": 0.2}, forward_only=True)
STEP = OptimStep(AdamParams(learning_rate=1e-2, eps=1e-8))


def learn(seed: int) -> ForwardBackward:
    return replace(PROBE, batch=batch(valued(seed, (9, 4))), forward_only=False)


def run(world: World, worker: Worker, model_id: str, seq: int, op: Op) -> Result:
    payload = ops.encode(op)
    if seq == 0:
        world.oplog.create_model(model_id, dump(Model("me", "session", BASE, 0.0, critic=True)))
    world.oplog.admit(model_id, seq, op.kind, payload, ops.digest(payload))
    result = worker.runner.handle(ids.request_id(model_id, seq), model_id, op.kind)
    assert result is not None and not result.failed, result
    return result


def values(result: Result) -> bytes:
    output = pb.ForwardBackwardOutput.FromString(result.body)
    assert list(output.loss_fn_outputs[0].fields) == ["values"]
    return output.loss_fn_outputs[0].fields["values"].data


def undisturbed(world: World, steps: int) -> bytes:
    backend = world.worker("reference/0").backend
    output = None
    for op in [Create(SPEC.lora, critic=True), *(op for seed in range(steps) for op in (learn(seed), STEP)), PROBE]:
        output = backend.apply({CRITIC: op})[CRITIC]
    backend.close(CRITIC)
    assert isinstance(output, CriticOutput)
    return output.values.values.tobytes()


def test_a_critic_comes_back_from_its_snapshot_and_the_journal_behind_it(world: World) -> None:
    """The restore is on another node, which has only the object store and Redis."""
    first = world.worker("a/1", share=1.0)
    run(world, first, CRITIC, 0, CreateModel(SPEC))
    run(world, first, CRITIC, 1, learn(0))
    run(world, first, CRITIC, 2, STEP)
    await_true(lambda: int(world.client.hget(keys.model(CRITIC), "snapshot_seq")) == 2, "no durable snapshot")
    run(world, first, CRITIC, 3, learn(1))
    first.owner.discard(CRITIC)
    successor = world.worker("b/1")
    run(world, successor, CRITIC, 4, STEP)
    assert values(run(world, successor, CRITIC, 5, PROBE)) == undisturbed(world, 2)
    successor.backend.close(CRITIC)


def test_a_critics_checkpoint_says_so_and_makes_a_critic(world: World) -> None:
    worker = world.worker("a/1")
    for seq, op in enumerate((CreateModel(SPEC), learn(0), STEP, SaveWeights("weights", "here"))):
        run(world, worker, CRITIC, seq, op)
    path = f"tinker://{CRITIC}/weights/here"
    checkpoint = load(Checkpoint, world.records.get(Checkpoint.namespace, path))
    assert (checkpoint.critic, LoraSpec(**checkpoint.lora)) == (True, SPEC.lora)
    run(world, worker, RESUMED, 0, CreateModel(SPEC, path, optimizer=True, prefix=checkpoint.prefix))
    for seq, op in ((4, learn(1)), (5, STEP)):
        run(world, worker, CRITIC, seq, op)
        run(world, worker, RESUMED, seq - 3, op)
    assert values(run(world, worker, RESUMED, 3, PROBE)) == values(run(world, worker, CRITIC, 6, PROBE))
    for model_id in (CRITIC, RESUMED):
        worker.backend.close(model_id)
