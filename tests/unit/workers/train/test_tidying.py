from __future__ import annotations

from dataclasses import replace

import pytest

from app.domain.records import Session, dump
from app.stores.redis import keys
from app.stores.redis.lifecycle import RedisLifecycle
from tests.unit.workers.conftest import BASE, MODEL, Worker, World, add_model, logprob_bytes, probe, step, undisturbed


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


def test_an_idle_model_is_saved_and_let_go_and_comes_back_bit_for_bit(world: World):
    expected = undisturbed(world, [0, 1])
    worker = trained(world)
    evict_idle(worker, idle_s=600)
    assert not is_free(world, worker)
    held = worker.backend.describe()["models"]
    evict_idle(worker, idle_s=0)
    assert is_free(world, worker)
    assert worker.backend.describe()["models"] == held - 1
    world.await_snapshot(2)
    heir = world.worker("b/1")
    for seq, op in enumerate(step(1), 3):
        world.admit(seq, op)
        heir.handle(seq)
    assert logprob_bytes(probe(heir, world, 5)) == expected


def test_a_model_whose_session_is_over_is_let_go(world: World):
    worker = trained(world)
    world.records.put(Session.namespace, "session", dump(Session("me", 0.0)))
    lifecycle = RedisLifecycle(world.client, world.settings)
    lifecycle.heartbeat("session")
    evict_idle(worker, idle_s=600)
    assert not is_free(world, worker)
    lifecycle.finish("session", "success")
    evict_idle(worker, idle_s=600)
    assert is_free(world, worker)


def test_what_takes_long_to_let_go_is_spread_over_ticks(world: World, monkeypatch: pytest.MonkeyPatch):
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
    evict_idle(worker, idle_s=600)
    assert worker.dispatched == [("create_model", f"{MODEL}:0", f"train.{BASE}@a")]
