"""A deleted model is gone for every worker that holds it, and no later model starts from any part of it."""

from __future__ import annotations

import json

import pytest

from app import ids
from app.domain import ops
from app.domain.ops import CreateModel, ModelSpec, Op
from app.domain.records import Model
from app.domain.results import Result
from app.errors import Fenced
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import dump
from tests.unit.workers.conftest import BASE, LORA, MODEL, PROBE, Worker, World, logprob_bytes, step, undisturbed

NEXT = "session:train:1"


def run(world: World, worker: Worker, model_id: str, seq: int, op: Op) -> Result | None:
    payload = ops.encode(op)
    request = world.oplog.admit(model_id, seq, op.kind, payload, ops.digest(payload)).request_id
    return worker.runner.handle(request, model_id, op.kind)


def trained(world: World) -> Worker:
    """A model with two steps, and a gradient for the third."""
    worker = world.worker("a/1", share=1.0)
    worker.handle(0)
    for seq, op in enumerate([*step(0), *step(1), step(2)[0]], 1):
        run(world, worker, MODEL, seq, op)
    return worker


def delete(world: World) -> None:
    RedisLifecycle(world.client, world.settings).end_model(MODEL)


def test_the_memory_of_a_deleted_model_is_freed_at_the_next_tick(world: World):
    worker = trained(world)
    held = worker.backend.describe()["models"]
    delete(world)
    worker.on_tick()
    assert worker.backend.describe()["models"] == held - 1
    assert not worker.owner.residents()


def test_the_owners_late_commit_is_refused_and_nothing_of_the_model_comes_back(world: World):
    worker = trained(world)
    lease = worker.owner.residents()[MODEL].lease
    delete(world)
    with pytest.raises(Fenced):
        world.oplog.commit(lease, 6, Result(b"late"))
    with pytest.raises(Fenced):
        world.oplog.set_snapshot(lease, 5, "late")
    assert world.oplog.entry(MODEL, 5) is None


def test_a_call_that_runs_while_its_model_is_deleted_fails_and_frees_the_memory(world: World, monkeypatch):
    worker = trained(world)
    held, apply = worker.backend.describe()["models"], worker.backend.apply

    def deleted_meanwhile(ops):
        delete(world)
        return apply(ops)

    monkeypatch.setattr(worker.backend, "apply", deleted_meanwhile)
    with pytest.raises(Exception, match="cannot be committed under epoch"):
        run(world, worker, MODEL, 6, step(2)[1])
    monkeypatch.undo()
    result = worker.runner.handle(ids.request_id(MODEL, 6), MODEL, "optim_step")
    assert result is not None and json.loads(result.body)["category"] == "user"
    assert worker.backend.describe()["models"] == held - 1


def test_the_next_model_of_the_same_session_and_seed_is_a_fresh_one_bit_for_bit(world: World):
    expected = undisturbed(world, [])
    expected_after_a_step = undisturbed(world, [7])
    worker = trained(world)
    delete(world)
    world.oplog.create_model(NEXT, dump(Model("me", "session", BASE, 0.0)))
    run(world, worker, NEXT, 0, CreateModel(ModelSpec(BASE, LORA)))
    found = run(world, worker, NEXT, 1, PROBE)
    assert found is not None and logprob_bytes(found.body) == expected
    for seq, op in enumerate(step(7), 2):
        run(world, worker, NEXT, seq, op)
    found = run(world, worker, NEXT, 4, PROBE)
    assert found is not None and logprob_bytes(found.body) == expected_after_a_step, "no moment or gradient is left"
    worker.owner.discard(NEXT)
