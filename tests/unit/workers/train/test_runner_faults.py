"""Faults of a commit or a dispatch that the Op itself does not show, and the runner's reaction."""

from __future__ import annotations

import pytest
import redis

from app.domain.ops import SaveWeights
from app.errors import Requeue
from app.stores.redis import keys, payloads
from app.stores.redis.payloads import Placed, Staging
from tests.unit.workers.conftest import (
    BASE,
    MODEL,
    World,
    logprob_bytes,
    probe,
    step,
    undisturbed,
)
from tests.unit.workers.train.saves import admit


def test_a_state_whose_commit_ended_oddly_is_thrown_away(world: World, monkeypatch: pytest.MonkeyPatch):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    world.admit(1, step()[0])

    def odd(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(worker.runner._oplog, "commit", odd)
        with pytest.raises(MemoryError):
            worker.handle(1)
    assert not worker.owner.residents()


def test_an_op_whose_commit_is_in_doubt_is_dispatched_again_at_once(world: World, monkeypatch: pytest.MonkeyPatch):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    world.admit(1, step()[0])

    def away(*_: object) -> None:
        raise redis.ConnectionError("away")

    with monkeypatch.context() as outage:
        outage.setattr(worker.runner._oplog, "commit", away)
        with pytest.raises(Requeue, match="may or may not have happened"):
            worker.handle(1)
    assert worker.dispatched == [("forward_backward", f"{MODEL}:1", f"train.{BASE}")]
    assert not worker.owner.residents()


def test_a_state_whose_commit_is_in_doubt_is_discarded_though_its_pass_cannot_be_charged(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    world.admit(1, step()[0])

    def away(*_: object) -> None:
        raise redis.ConnectionError("away")

    def unknown(project: str) -> float:
        raise TypeError("a limit of a later version")

    monkeypatch.setattr(worker.runner._scheduler._fair_queue, "_weight_of", unknown)
    with monkeypatch.context() as outage:
        outage.setattr(worker.runner._oplog, "commit", away)
        with pytest.raises(Requeue, match="may or may not have happened"):
            worker.handle(1)
    assert not worker.owner.residents()
    assert worker.handle(1) is not None


def test_a_gradient_whose_result_lapsed_before_its_commit_counts_once(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(payloads, "PIECE_BYTES", 64)
    monkeypatch.setattr(world.oplog, "_large", 0)
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    admit(world, *step(0), *step(1))
    write = Staging.write
    with monkeypatch.context() as late:
        late.setattr(Staging, "write", lambda self, key, content: write(self, key, content[64:]))
        with pytest.raises(Requeue, match="has lapsed"):
            worker.handle(1)
    assert worker.handle(4, "optim_step") is not None
    assert logprob_bytes(probe(worker, world, 5)) == undisturbed(world, [0, 1])
    assert world.oplog.outcome(f"{MODEL}:1") is not None


def test_an_outage_in_the_middle_of_an_op_leaves_it_free_for_anybody(world: World, monkeypatch: pytest.MonkeyPatch):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    world.admit(1, SaveWeights("weights", "kept"))

    def away(*_: object) -> None:
        raise redis.ConnectionError("away")

    with monkeypatch.context() as outage:
        outage.setattr(worker.parts.records, "find", away)
        with pytest.raises(redis.ConnectionError):
            worker.handle(1, "save_weights")
    assert [pending.running for pending in world.oplog.pending()] == [False]
    saved = world.worker("b/1").handle(1, "save_weights")
    assert saved is not None and not saved.failed


def test_a_payload_that_lapsed_on_its_way_in_leaves_nothing_behind(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(world.oplog._staging, "place", lambda payload: Placed(b"", keys.staged("gone"), len(payload)))
    monkeypatch.setattr(world.oplog._staging, "write", lambda key, payload: None)
    with pytest.raises(Exception, match="has expired"):
        world.admit(1, step()[0])
    assert world.oplog.entry(MODEL, 1) is None
