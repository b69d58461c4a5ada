"""A run's progress is that of its committed calls, each once, as if nothing had died, been replayed or run together."""

from __future__ import annotations

import pytest

from app.domain.progress import Progress
from app.errors import Requeue, UserOpError
from app.stores.redis import keys
from tests.unit.workers.conftest import MODEL, World, batch, step
from tests.unit.workers.train.test_scheduler import A, B, gradient, handle, merging
from tests.unit.workers.train.test_scheduler import admit as admit_to
from tests.unit.workers.train.test_usage import BATCH_TOKENS, lost_answer, never_arrives

__all__ = ["merging"]


def progress(world: World, model_id: str = MODEL) -> Progress:
    return world.records.progress([model_id], 100)[0]


def seqs(world: World, model_id: str = MODEL) -> list[int]:
    return [point.seq for point in progress(world, model_id).points]


def test_it_has_what_each_call_answered_and_replays_add_nothing(world: World):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    for seq, op in enumerate([*step(0), *step(1)], 1):
        world.admit(seq, op)
        worker = world.worker(f"a/{seq}")  # the worker before died, and the whole journal is replayed
        worker.handle(seq, op.kind)
    found = progress(world)
    assert (found.steps, found.trained_tokens) == (2, 2 * BATCH_TOKENS)
    assert [point.kind for point in found.points] == ["forward_backward", "optim_step"] * 2
    assert seqs(world) == [1, 2, 3, 4]
    first, second = found.points[:2]
    assert (first.tokens, first.weight) == (BATCH_TOKENS, len(batch(0).inputs["target_tokens"].values))
    assert "loss:sum" in first.metrics and {"grad_norm", "learning_rate"} <= second.metrics.keys()
    assert all(point.seconds > 0 for point in found.points)
    assert found.loss == pytest.approx(found.points[2].metrics["loss:sum"] / found.points[2].weight)


def test_a_failed_call_adds_nothing(world: World, monkeypatch: pytest.MonkeyPatch):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    for seq, op in enumerate(step(), 1):
        world.admit(seq, op)
    monkeypatch.setattr(worker.backend, "apply", lambda ops: dict.fromkeys(ops, UserOpError("infinite")))
    for seq in (1, 2):
        result = worker.handle(seq)
        assert result is not None and result.failed
    assert progress(world) == Progress(0, 0, [])


@pytest.mark.parametrize("outage", [lost_answer, never_arrives])
def test_a_commit_in_doubt_adds_its_point_once(world: World, monkeypatch: pytest.MonkeyPatch, outage):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    world.admit(1, step()[0])
    with monkeypatch.context() as patch:
        patch.setattr(worker.runner._oplog, "commit", outage(worker.runner._oplog.commit))
        with pytest.raises(Requeue, match="may or may not have happened"):
            worker.handle(1)
    for name in ("a/2", "a/3"):
        world.client.delete(keys.lease(MODEL))
        assert world.worker(name).handle(1) is not None
    assert seqs(world) == [1] and progress(world).trained_tokens == BATCH_TOKENS


def test_each_run_of_a_shared_pass_gets_its_own(world: World, merging):
    for model_id in (A, B):
        admit_to(world, model_id, 1, gradient(1))
    handle(merging, A, 1)
    assert seqs(world, A) == seqs(world, B) == [1]
