from __future__ import annotations

import pytest

from app.stores.redis import keys
from tests.unit.workers.conftest import BASE, MODEL, Worker, World, logprob_bytes, probe, step, undisturbed


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
