"""Ops of a newer version wait for a newer worker. An older worker cannot read them and does no harm to them.

Ops that only a newer worker may run wait in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from app import ids
from app.domain import ops
from app.domain.ops import OptimStep
from app.errors import Requeue
from app.stores.objects.folder import FolderStore
from app.stores.redis import keys
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.payloads import RedisPayloads
from app.stores.redis.types import Lease
from tests.unit.workers import newer_version
from tests.unit.workers.conftest import BASE, MODEL, Worker, World, add_model, logprob_bytes, probe, step, undisturbed
from workers.maintenance.orphans import Orphans
from workers.maintenance.redispatch import Redispatcher
from workers.train import runner

OTHER = "session:train:1"
STEP = step()[1]
assert isinstance(STEP, OptimStep)


def journal(world: World, seq: int, payload: bytes, model_id: str = MODEL, kind: str = OptimStep.kind) -> str:
    return world.oplog.admit(model_id, seq, kind, payload, ops.digest(payload)).request_id


def attempts(world: World, request_id: str) -> int:
    return int(world.client.hget(keys.op(request_id), "attempts") or 0)


@pytest.fixture
def old(world: World) -> Worker:
    """An older worker that holds the model, with a pending gradient."""
    worker = world.worker("old/1")
    worker.handle(0, "create_model")
    world.admit(1, step()[0])
    worker.handle(1)
    return worker


@newer_version.WAYS
def test_a_newer_op_is_left_without_an_attempt_and_its_model_free_for_a_newer_worker(
    world: World,
    old: Worker,
    write: Callable[[OptimStep], bytes],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("workers.train.scheduler._FIRST_PAUSE_S", 0.0)
    request = journal(world, 2, write(STEP))
    for _ in range(5):  # more often than an Op has attempts
        with pytest.raises(Requeue, match="version"):
            old.handle(2, OptimStep.kind)
        assert not world.client.exists(keys.lease(MODEL))
        assert not world.client.hexists(keys.op(request), "runner")
    assert attempts(world, request) == 0
    assert world.oplog.outcome(request) is None
    assert [(pending.id, pending.seq, pending.running) for pending in world.oplog.pending()] == [(MODEL, 2, False)]
    said = [record for record in caplog.records if record.levelno >= logging.WARNING and record.name == runner.__name__]
    assert [record.request_id for record in said] == [request] * 5
    assert all(len(record.getMessage()) < 200 and not record.exc_info for record in said)


def test_a_newer_worker_takes_it_over_and_comes_to_the_same_bits(
    world: World, old: Worker, monkeypatch: pytest.MonkeyPatch
):
    request = journal(world, 2, newer_version.encode(STEP))
    with pytest.raises(Requeue):
        old.handle(2, OptimStep.kind)
    newer_version.upgrade(monkeypatch)
    successor = world.worker("new/1")
    result = successor.handle(2, OptimStep.kind)
    assert result is not None and not result.failed
    assert attempts(world, request) == 0
    assert logprob_bytes(probe(successor, world, 3)) == undisturbed(world, [0])


def test_the_old_worker_goes_on_with_other_models(world: World, old: Worker):
    journal(world, 2, newer_version.encode(STEP))
    with pytest.raises(Requeue):
        old.handle(2, OptimStep.kind)
    add_model(world, OTHER)
    for seq, kind in enumerate(["create_model", "forward_backward", OptimStep.kind]):
        if seq:
            op = step()[seq - 1]
            journal(world, seq, ops.encode(op), OTHER, op.kind)
        result = old.runner.handle(ids.request_id(OTHER, seq), OTHER, kind)
        assert result is not None and not result.failed
    assert not world.client.exists(keys.lease(MODEL)), "nor did it look at the newer one in between"


def test_what_ran_before_it_is_committed(world: World, old: Worker):
    """The newer Op is dispatched: the gradient before it runs and is committed."""
    world.admit(2, step(1)[0])
    journal(world, 3, newer_version.encode(STEP))
    with pytest.raises(Requeue):
        old.handle(3, OptimStep.kind)
    before = world.oplog.outcome(ids.request_id(MODEL, 2))
    assert before is not None and not before.failed


def test_a_replay_that_comes_upon_a_newer_op_leaves_the_model_to_a_newer_worker(
    world: World, old: Worker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("workers.train.scheduler._FIRST_PAUSE_S", 0.0)
    journal(world, 2, newer_version.encode(STEP))
    old.drain.release()
    with monkeypatch.context() as upgraded:
        newer_version.upgrade(upgraded)
        successor = world.worker("new/1")
        successor.handle(2, OptimStep.kind)
        waiting = world.admit(3, step(1)[0])
        successor.drain.release()
    back = world.worker("old/2")
    for _ in range(5):
        with pytest.raises(Requeue, match="version"):
            back.handle(3)
        assert not world.client.exists(keys.lease(MODEL))
    assert attempts(world, waiting) == 0
    newer_version.upgrade(monkeypatch)
    result = world.worker("new/2").handle(3)
    assert result is not None and not result.failed


def test_an_old_worker_does_not_bring_a_model_back_for_what_it_cannot_read(
    world: World, old: Worker, monkeypatch: pytest.MonkeyPatch
):
    journal(world, 2, newer_version.encode(STEP))
    old.drain.release()
    successor = world.worker("old/2")

    def restored(lease: Lease) -> None:
        raise AssertionError("a model may take a minute to bring back")

    monkeypatch.setattr(successor.owner, "_restore", restored)
    with pytest.raises(Requeue, match="version"):
        successor.handle(2, OptimStep.kind)


def test_an_old_worker_retries_until_another_has_run_it(world: World, old: Worker, monkeypatch: pytest.MonkeyPatch):
    journal(world, 2, newer_version.encode(STEP))
    with pytest.raises(Requeue):
        old.handle(2, OptimStep.kind)
    assert old.retry_backoff.is_backing_off(MODEL)
    with monkeypatch.context() as upgraded:
        newer_version.upgrade(upgraded)
        successor = world.worker("new/1")
        found = successor.handle(2, OptimStep.kind)
        successor.drain.release()
    assert old.handle(2, OptimStep.kind) == found, "though it cannot bring the model back"
    assert not old.retry_backoff.is_backing_off(MODEL)


def test_redispatch_sends_it_to_the_queue_that_every_worker_reads(world: World, old: Worker):
    request = journal(world, 2, newer_version.encode(STEP))
    with pytest.raises(Requeue):
        old.handle(2, OptimStep.kind)
    world.client.zadd(keys.PENDING, {MODEL: 0})
    dispatched: list[tuple[str, ...]] = []
    Redispatcher(world.oplog, lambda *send: dispatched.append(send), world.settings, world.client).sweep()
    assert dispatched == [(OptimStep.kind, request, MODEL, f"train.{BASE}")]


def test_what_shares_a_pass_is_not_held_up_by_a_newer_op(world: World):
    worker = world.worker("old/1", merged_tokens=8192)
    add_model(world, OTHER)
    worker.backend.close(OTHER)
    for model_id in (MODEL, OTHER):
        worker.runner.handle(ids.request_id(model_id, 0), model_id, "create_model")
    gradient = step()[0]
    unread = journal(world, 1, newer_version.with_a_further_field(gradient), OTHER, gradient.kind)
    world.admit(1, gradient)
    result = worker.handle(1)
    assert result is not None and not result.failed
    assert attempts(world, unread) == 0 and not world.client.hexists(keys.op(unread), "runner")
    batched_with = world.admit(2, gradient)
    with pytest.raises(Requeue):  # in the other order: the dispatched Op cannot be read
        worker.runner.handle(unread, OTHER, gradient.kind)
    for request in (unread, batched_with):
        assert attempts(world, request) == 0 and not world.client.hexists(keys.op(request), "runner")
    result = worker.handle(2)
    assert result is not None and not result.failed


def test_no_stored_file_is_removed_while_a_newer_op_may_need_it(
    world: World, old: Worker, caplog: pytest.LogCaptureFixture
):
    prefix = f"models/{MODEL}/weights/gone/0-0"
    objects = FolderStore(world.folder / "objects", "secret", "http://x")
    objects.put_new(f"{prefix}/adapter", b"bytes")
    journal(world, 2, newer_version.encode(STEP), kind="load_weights")
    settings = world.settings.model_copy(update={"orphan_s": 1e-6})
    payloads, lifecycle = RedisPayloads(world.client, settings, objects), RedisLifecycle(world.client, settings)
    orphans = Orphans(world.oplog, lifecycle, world.records, payloads, objects, settings)
    orphans.sweep()
    orphans._next = 0.0
    orphans.sweep()
    assert objects.read(f"{prefix}/adapter") == b"bytes"
    assert "no orphan is removed" in caplog.text
