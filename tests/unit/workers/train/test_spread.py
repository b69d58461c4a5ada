from __future__ import annotations

import pytest

from app.domain.records import Worker as WorkerRecord
from app.domain.records import dump
from app.errors import Requeue
from tests.unit.workers.conftest import BASE, MODEL, Worker, World, add_model
from workers.train.rebalance import Rebalancer

SECOND = "session:train:1"


def announce(world: World, node: str, models: int, role: str = "trainer", healthy: bool = True) -> None:
    record = WorkerRecord(role, BASE, {}, {"models": models}, "", 0.0, healthy)
    world.records.put(WorkerRecord.namespace, node, dump(record))


@pytest.fixture
def busy(world: World) -> Worker:
    """Trainer a owns one model; another model waits for an owner."""
    worker = world.worker("a/1")
    worker.handle(0)
    add_model(world, SECOND)
    announce(world, "a", 1)
    return worker


def handle(rebalancer: Rebalancer, model_id: str) -> bool:
    """Handles the dispatch. Returns True if the trainer accepted it."""
    try:
        return rebalancer.handle(f"{model_id}:0", model_id, "create_model") is not None
    except Requeue:
        return False


def test_a_model_nobody_has_goes_to_the_trainer_with_fewer(world: World, busy: Worker):
    announce(world, "b", 3)
    announce(world, "c", 0)
    assert not handle(busy.rebalancer, SECOND)
    assert busy.dispatched == [("create_model", f"{SECOND}:0", f"train.{BASE}@c")]


def test_trainers_of_adapters_and_of_all_weights_are_kept_apart(world: World, busy: Worker):
    announce(world, "b", 0, role="full_trainer")
    send = busy.parts.dispatcher.send
    of_weights = Rebalancer(busy.runner, busy.owner, world.records, send, BASE, "a", full=True)
    assert not handle(of_weights, SECOND)
    assert busy.dispatched == [("create_model", f"{SECOND}:0", f"full.{BASE}@b")]
    assert handle(busy.rebalancer, SECOND)


def test_a_trainer_keeps_what_it_has(world: World, busy: Worker):
    announce(world, "b", 0)
    assert handle(busy.rebalancer, MODEL)


@pytest.mark.parametrize("other", [{"models": 1}, {"models": 0, "role": "sampler"}, {"models": 0, "healthy": False}])
def test_a_trainer_takes_what_no_other_should(world: World, busy: Worker, other: dict[str, object]):
    announce(world, "b", **other)
    assert handle(busy.rebalancer, SECOND)
