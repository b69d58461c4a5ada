from __future__ import annotations

from dataclasses import replace

import pytest

from app.domain.records import Session
from app.domain.records import Worker as WorkerRecord
from app.errors import Requeue
from app.stores.redis import keys
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import dump
from tests.unit.workers.conftest import BASE, MODEL, Worker, World, add_model, logprob_bytes, probe, step, undisturbed
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


def test_an_unowned_model_goes_to_the_trainer_with_fewer(world: World, busy: Worker):
    announce(world, "b", 3)
    announce(world, "c", 0)
    assert not handle(busy.rebalancer, SECOND)
    assert busy.dispatched == [("create_model", f"{SECOND}:0", f"train.{BASE}@c")]


def test_trainers_of_adapters_and_of_full_models_are_kept_apart(world: World, busy: Worker):
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


def half_way(world: World) -> Worker:
    """Two of four Ops have run."""
    worker = world.worker("a/1")
    for seq, op in enumerate([*step(0), *step(1)], 1):
        world.admit(seq, op)
    for seq in range(3):
        worker.handle(seq)
    return worker


def test_another_trainer_goes_on_at_once_with_what_a_drained_one_left(world: World):
    expected = undisturbed(world, [0, 1])
    worker = half_way(world)
    worker.dispatched.clear()
    worker.drain.settle_and_release(60)
    assert not world.client.exists(keys.lease(MODEL)), "nobody waits for it to lapse"
    shared = f"train.{BASE}"
    assert worker.dispatched == [("forward_backward", f"{MODEL}:3", shared), ("optim_step", f"{MODEL}:4", shared)]
    assert int(world.head()[b"snapshot_seq"]) == 2, "the other one replays nothing"
    other = world.worker("b/1")
    for kind, request_id, _ in worker.dispatched:
        assert other.runner.handle(request_id, MODEL, kind) is not None
    assert logprob_bytes(probe(other, world, 5)) == expected


def test_a_backend_of_no_use_does_not_keep_the_models(world: World, monkeypatch: pytest.MonkeyPatch):
    worker = half_way(world)
    worker.dispatched.clear()

    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("a rank is gone")

    for method in ("capture", "close", "apply"):
        monkeypatch.setattr(worker.backend, method, broken)
    worker.drain.settle_and_release(60)
    assert not world.client.exists(keys.lease(MODEL))
    assert len(worker.dispatched) == 2


def test_a_store_that_hangs_leaves_time_for_the_snapshot_on_the_disk(world: World, monkeypatch: pytest.MonkeyPatch):
    worker, given = half_way(world), list[float]()
    monkeypatch.setattr(worker.shm_transfers, "finish", lambda model_id, within_s: given.append(within_s))
    worker.drain.settle_and_release(60)
    assert 0 < given[0] <= 30, "half of it"


def test_a_trainer_without_time_leaves_states_to_the_journal(world: World):
    expected = undisturbed(world, [0, 1])
    worker = half_way(world)
    worker.drain.settle_and_release(0)
    assert not world.client.exists(keys.lease(MODEL))
    other = world.worker("b/1")
    for seq in (3, 4):
        other.handle(seq)
    assert logprob_bytes(probe(other, world, 5)) == expected


def trained(world: World) -> Worker:
    worker = world.worker("a/1")
    for seq, op in enumerate(step(0), 1):
        world.admit(seq, op)
    for seq in range(3):
        worker.handle(seq)
    return worker


def evict_idle(worker: Worker, idle_s: float) -> None:
    replace(worker.idle_eviction, idle_s=idle_s)()


def is_free(world: World, worker: Worker) -> bool:
    return not worker.owner.residents() and not world.client.exists(keys.lease(MODEL))


def test_an_idle_model_is_saved_and_evicted_and_comes_back_bit_for_bit(world: World):
    expected = undisturbed(world, [0, 1])
    worker = trained(world)
    evict_idle(worker, idle_s=600)
    assert not is_free(world, worker)
    held = worker.backend.describe()["models"]
    evict_idle(worker, idle_s=0)
    assert is_free(world, worker)
    assert worker.backend.describe()["models"] == held - 1
    world.await_snapshot(2)
    successor = world.worker("b/1")
    for seq, op in enumerate(step(1), 3):
        world.admit(seq, op)
        successor.handle(seq)
    assert logprob_bytes(probe(successor, world, 5)) == expected


def test_a_model_whose_session_is_over_is_evicted(world: World):
    worker = trained(world)
    world.records.put(Session.namespace, "session", dump(Session("me", 0.0)))
    lifecycle = RedisLifecycle(world.client, world.settings)
    lifecycle.heartbeat("session")
    evict_idle(worker, idle_s=600)
    assert not is_free(world, worker)
    lifecycle.finish("session", "success")
    evict_idle(worker, idle_s=600)
    assert is_free(world, worker)


def test_evictions_that_take_long_are_spread_over_ticks(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("workers.train.rebalance._AT_ONCE_S", -1.0)  # every model qualifies
    worker = world.worker("a/1")
    others = ["session:train:1", "session:train:2"]
    for model_id in others:
        add_model(world, model_id)
    for model_id in (MODEL, *others):
        worker.runner.handle(f"{model_id}:0", model_id, "create_model")
    left = []
    for _ in range(3):
        evict_idle(worker, idle_s=0)
        left.append(list(worker.owner.residents()))
    assert left == [others, others[1:], []]


def test_what_was_put_off_is_dispatched_again_at_a_tick(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("workers.train.scheduler._FIRST_PAUSE_S", 0.0)
    worker = world.worker("a/1")
    worker.retry_backoff.retry_later(MODEL, 0, "create_model")
    worker.on_tick()
    assert worker.dispatched == [("create_model", f"{MODEL}:0", f"train.{BASE}@a")]
