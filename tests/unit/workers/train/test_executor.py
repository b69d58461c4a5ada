"""No optim_step runs on part of its gradients, and a failed one does no harm."""

from __future__ import annotations

import json

import pytest

from app.domain.ops import FORWARD, FORWARD_BACKWARD, CreateModel, ModelSpec
from app.domain.records import Model
from app.stores.redis import keys
from app.stores.redis.records import dump
from app.stores.redis.types import Entry
from tests.unit.workers.conftest import BASE, LORA, PROBE, World, step
from tests.unit.workers.train.saves import OTHER, admit
from workers.train.executor import GradAccumulation

GOOD, STEP, LOAD, EVAL = (FORWARD_BACKWARD, ""), ("optim_step", ""), ("load_weights", ""), (FORWARD, "")
FAILED, REFUSED, GAP = (FORWARD_BACKWARD, "infinite"), ("lost_batch", ""), ("drop_gradients", "")


def accumulation(*history: tuple[str, str]) -> GradAccumulation:
    found = GradAccumulation()
    for kind, failure in history:
        found = found.after(
            Entry(1, kind, "r", b"", "lost" if kind in ("lost_batch", "drop_gradients") else "", 1), failure
        )
    return found


@pytest.mark.parametrize(
    ("history", "may_step"),
    [
        ([GOOD], True),
        ([FAILED], False),
        ([REFUSED], False),
        ([GAP], False),
        ([FAILED, EVAL], False),
        ([FAILED, GOOD], False),  # sent again, or sent before the failure was known?
        ([REFUSED, GOOD], True),  # sent again
        ([REFUSED, REFUSED, GOOD], True),
        ([GOOD, FAILED, GOOD], False),  # if the last is the whole batch again, the first counts twice
        ([GOOD, REFUSED, GOOD, GOOD], False),
        ([GOOD, GAP, GOOD], True),  # the gap dropped the gradients before it
        ([GOOD, FAILED, STEP, GOOD], True),  # the failed step ended the window
        ([FAILED, STEP, GOOD], True),
        ([GOOD, FAILED, LOAD, GOOD], True),
        ([GOOD, FAILED, ("load_weights", "no such checkpoint"), GOOD], False),
    ],
)
def test_a_step_runs_only_on_whole_gradients(history, may_step):
    assert (not accumulation(*history).missing) == may_step


def test_a_model_whose_creation_failed_has_no_gradients_to_drop(world: World):
    """The calls behind it fail with their own errors, live and in a replay, and no restore fails."""
    world.oplog.create_model(OTHER, dump(Model("me", "session", BASE, 0.0)))
    nowhere = CreateModel(ModelSpec(BASE, LORA), "tinker://gone/weights/a", prefix="models/gone/weights/a/1-1")
    admit(world, nowhere, *step(0), first=0, model_id=OTHER)
    world.oplog.refuse(OTHER, 3, "seq 3 never came", "drop_gradients")
    admit(world, PROBE, PROBE, first=4, model_id=OTHER)

    def error(boot: str, seq: int, kind: str) -> str:
        result = world.worker(boot).runner.handle(f"{OTHER}:{seq}", OTHER, kind)
        assert result is not None and result.failed
        return str(json.loads(result.body)["error"])

    assert "no checkpoint at" in error("a/1", 0, "create_model")
    assert "no step was taken" in error("a/1", 2, "optim_step")
    world.client.delete(keys.lease(OTHER))
    assert "is not loaded" in error("b/1", 4, FORWARD)
    world.client.delete(keys.lease(OTHER))
    assert "cannot be restored" not in error("c/1", 5, FORWARD)
