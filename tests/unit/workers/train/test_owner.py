from __future__ import annotations

from types import SimpleNamespace

import pytest

from app.domain.results import Result
from app.stores.redis import keys
from app.stores.redis.types import Lease, OwnedElsewhere
from tests.unit.workers.conftest import MODEL, Worker, World, add_model, logprob_bytes, probe, step, undisturbed
from workers.train import owner

SECOND, THIRD = "session:train:1", "session:train:2"


def created(worker: Worker, model_id: str) -> Result | None:
    return worker.runner.handle(f"{model_id}:0", model_id, "create_model")


def owned(worker: Worker) -> list[str]:
    return list(worker.owner.residents())


def test_the_least_recently_used_model_makes_room_and_comes_back_bit_for_bit(world: World):
    expected = undisturbed(world, [0, 1])
    worker = world.worker("a/1", most=2)
    for seq, op in enumerate([*step(0), *step(1)], 1):
        world.admit(seq, op)
    for seq in range(3):
        worker.handle(seq)
    for model_id in (SECOND, THIRD):
        add_model(world, model_id)
        created(worker, model_id)
    assert owned(worker) == [SECOND, THIRD]
    assert not world.client.exists(keys.lease(MODEL))
    world.await_snapshot(2)
    for seq in (3, 4):
        worker.handle(seq)
    assert owned(worker) == [THIRD, MODEL]
    assert logprob_bytes(probe(worker, world, 5)) == expected


def test_a_model_that_is_used_stays(world: World):
    worker = world.worker("a/1", most=2)
    worker.handle(0)
    add_model(world, SECOND)
    created(worker, SECOND)
    worker.handle(0)
    add_model(world, THIRD)
    created(worker, THIRD)
    assert owned(worker) == [MODEL, THIRD]


def test_a_death_between_a_restore_and_the_op_it_was_for_is_no_attempt(world: World):
    """Ops of other models may run in between."""
    world.worker("a/1").handle(0)
    request = world.admit(1, step()[0])
    for boot in range(4):  # more often than an Op has attempts
        world.client.delete(keys.lease(MODEL))
        world.worker(f"b/{boot}").owner.own(MODEL)
    world.client.delete(keys.lease(MODEL))
    result = world.worker("c/1").handle(1)
    assert result is not None and not result.failed
    assert world.client.hget(keys.op(request), "attempts") == b"0"


def test_a_state_whose_lease_was_not_kept_is_not_saved(world: World, monkeypatch: pytest.MonkeyPatch):
    worker = world.worker("a/1")
    worker.handle(0)
    settled: list[str] = []
    monkeypatch.setattr(worker.owner, "_settle", lambda resident, seconds: settled.append(resident.lease.model_id))
    worker.owner.settle(MODEL, 1.0)
    worker.parts.keeper.drop(MODEL)
    worker.owner.settle(MODEL, 1.0)
    assert settled == [MODEL]


def test_a_model_whose_lease_was_not_kept_is_leased_again_before_it_runs_on(world: World):
    worker = world.worker("a/1")
    worker.handle(0)
    worker.parts.keeper.drop(MODEL)
    world.client.delete(keys.lease(MODEL))
    world.admit(1, step(0)[0])
    worker.handle(1)
    assert world.client.get(keys.lease(MODEL)) == b"a/1"
    assert worker.parts.keeper.holds(MODEL)


def test_a_lease_counts_from_before_it_was_asked_for(world: World, monkeypatch: pytest.MonkeyPatch):
    worker = world.worker("a/1")
    now, asked = [1000.0], list[float]()
    acquire, add = world.oplog.acquire, worker.parts.keeper.add

    def slow(model_id: str, name: str) -> Lease | OwnedElsewhere:
        now[0] += 60
        return acquire(model_id, name)

    def noted(id_: str, at: float) -> None:
        asked.append(at)
        add(id_, at)

    monkeypatch.setattr(owner, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(world.oplog, "acquire", slow)
    monkeypatch.setattr(worker.parts.keeper, "add", noted)
    worker.owner.own(MODEL)
    assert asked == [1000.0]
