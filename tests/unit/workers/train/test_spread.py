from __future__ import annotations

import pytest

from app.domain.records import Worker as WorkerRecord
from app.domain.records import dump
from tests.unit.workers.conftest import BASE, MODEL, Worker, World, add_model
from workers.process.results import NotNow
from workers.train.rebalance import Spread

SECOND = "session:train:1"


def announce(world: World, node: str, models: int, role: str = "trainer", healthy: bool = True) -> None:
    record = WorkerRecord(role, BASE, {}, {"models": models}, "", 0.0, healthy)
    world.records.put(WorkerRecord.namespace, node, dump(record))


def spread(world: World, worker: Worker, node: str, *, full: bool = False) -> Spread:
    rung = worker.rung
    return Spread(
        worker.runner,
        worker.owner,
        world.records,
        lambda kind, request_id, parent, queue: rung.append((kind, request_id, queue)),
        BASE,
        node,
        full=full,
    )


@pytest.fixture
def busy(world: World) -> tuple[Worker, Spread]:
    """Trainer a owns one model; another model waits for an owner."""
    worker = world.worker("a/1")
    worker.handle(0)
    add_model(world, SECOND)
    announce(world, "a", 1)
    return worker, spread(world, worker, "a")


def handle(spread: Spread, model_id: str) -> bool:
    """Handles the dispatch. Returns True if the trainer accepted it."""
    try:
        return spread.handle(f"{model_id}:0", model_id, "create_model") is not None
    except NotNow:
        return False


def test_a_model_nobody_has_goes_to_the_trainer_with_fewer(world: World, busy: tuple[Worker, Spread]):
    worker, spread = busy
    announce(world, "b", 3)
    announce(world, "c", 0)
    assert not handle(spread, SECOND)
    assert worker.rung == [("create_model", f"{SECOND}:0", f"train.{BASE}@c")]


def test_trainers_of_adapters_and_of_all_weights_are_kept_apart(world: World, busy: tuple[Worker, Spread]):
    worker, of_adapters = busy
    announce(world, "b", 0, role="full_trainer")
    of_weights = spread(world, worker, "a", full=True)
    assert not handle(of_weights, SECOND)
    assert worker.rung == [("create_model", f"{SECOND}:0", f"full.{BASE}@b")]
    assert handle(of_adapters, SECOND)


def test_a_trainer_keeps_what_it_has(world: World, busy: tuple[Worker, Spread]):
    announce(world, "b", 0)
    assert handle(busy[1], MODEL)


@pytest.mark.parametrize("other", [{"models": 1}, {"models": 0, "role": "sampler"}, {"models": 0, "healthy": False}])
def test_a_trainer_takes_what_no_other_should(world: World, busy: tuple[Worker, Spread], other: dict[str, object]):
    announce(world, "b", **other)
    assert handle(busy[1], SECOND)
