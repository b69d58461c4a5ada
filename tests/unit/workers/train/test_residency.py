"""More models than a trainer or its device holds: the least recently used are evicted.

They come back on their next Op, bit for bit.
"""

from __future__ import annotations

import pytest

from app import ids
from app.domain import ops
from app.domain.ops import Op
from app.domain.results import Result
from tests.unit.workers.conftest import MODEL, PROBE, Worker, World, add_model, logprob_bytes, step, undisturbed

CREATED, HELD, ON_DEVICE, ACTIVE = 500, 16, 4, 20


def name(number: int) -> str:
    return f"session:train:{number}"


def run(world: World, worker: Worker, model_id: str, seq: int, op: Op) -> Result:
    payload = ops.encode(op)
    world.oplog.admit(model_id, seq, op.kind, payload, ops.digest(payload))
    result = worker.runner.handle(ids.request_id(model_id, seq), model_id, op.kind)
    assert result is not None and not result.failed
    return result


@pytest.mark.timeout(600)
def test_500_models_of_which_20_are_active_run_on_a_trainer_that_holds_16_with_4_on_its_device(world: World):
    trainer = world.base.trainer.model_copy(update={"device_models": ON_DEVICE})
    world.base = world.base.model_copy(update={"trainer": trainer})
    worker = world.worker("three-tiers/1", most=HELD)
    worker.handle(0, "create_model")
    for number in range(1, CREATED):
        add_model(world, name(number))
        assert worker.runner.handle(ids.request_id(name(number), 0), name(number), "create_model") is not None
        assert len(worker.owner.residents()) <= HELD
    active = [name(number) for number in range(0, CREATED, CREATED // ACTIVE)]
    assert MODEL in active
    for turn in range(2):
        for model_id in active:
            for at, op in enumerate(step(turn)):
                run(world, worker, model_id, 1 + 2 * turn + at, op)
    expected = undisturbed(world, [0, 1])
    for model_id in active:
        assert logprob_bytes(run(world, worker, model_id, 5, PROBE).body) == expected
    found = worker.backend.describe()
    assert found["models"] <= HELD
    assert found["models_on_device"] <= ON_DEVICE
