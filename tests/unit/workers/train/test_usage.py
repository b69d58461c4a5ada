"""Usage of a run and its samples is counted as if nothing had died, been replayed or been run together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from app.domain.ops import ForwardBackward, SaveWeights
from app.errors import Requeue, UserOpError
from app.stores.redis import keys
from tests.pages import used
from tests.unit.workers.conftest import MODEL, Worker, World, batch, step
from tests.unit.workers.sample.test_runner import REQUEST, SESSION, admit, backend, runner
from tests.unit.workers.train.test_scheduler import A, B, C, PassRecorder, gradient, handle, merging
from tests.unit.workers.train.test_scheduler import admit as admit_to
from workers.backends.sampling.base import SamplerBackend

__all__ = ["backend", "merging"]
BATCH_TOKENS = 19
TRAINED = "training session base"


def trained(world: World) -> int:
    return used(world.client).get(TRAINED, 0)


def test_forwards_and_batches_count_their_tokens_and_saves_their_checkpoints(world: World):
    worker = world.worker("a/1")
    gradient_op, optim_step = step()
    ops = [gradient_op, ForwardBackward(batch(1), "cross_entropy", forward_only=True), optim_step]
    ops += [
        SaveWeights("weights", "kept"),
        SaveWeights("weights", "kept"),
        SaveWeights("sampler_weights", "ephemeral", sampling_session_id="session:sample:9"),
    ]
    worker.handle(0, "create_model")
    for seq, op in enumerate(ops, 1):
        world.admit(seq, op)
    results = [worker.handle(seq, op.kind) for seq, op in enumerate(ops, 1)]
    assert [result.failed for result in results] == [False, False, False, False, True, False], "a name that is taken"
    assert used(world.client) == {TRAINED: 2 * BATCH_TOKENS, "checkpoint session base": 1}


def test_replays_count_nothing(world: World):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    for seq, op in enumerate([*step(0), *step(1), *step(2)], 1):
        world.admit(seq, op)
        worker = world.worker(f"a/{seq}")  # the worker before died, and the whole journal is replayed
        worker.handle(seq, op.kind)
    assert trained(world) == 3 * BATCH_TOKENS


def test_a_failed_batch_counts_nothing(world: World, monkeypatch: pytest.MonkeyPatch):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    world.admit(1, step()[0])
    monkeypatch.setattr(worker.backend, "apply", lambda ops: dict.fromkeys(ops, UserOpError("infinite")))
    result = worker.handle(1)
    assert result is not None and result.failed
    assert trained(world) == 0


def lost_answer(commit: Callable[..., None]) -> Callable[..., None]:
    def commit_and_fail(*args: Any) -> None:
        commit(*args)
        raise redis.ConnectionError("away")

    return commit_and_fail


def never_arrives(commit: Callable[..., None]) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise redis.ConnectionError("away")

    return fail


@pytest.mark.parametrize("outage", [lost_answer, never_arrives])
def test_a_commit_in_doubt_counts_once_whether_it_had_arrived_or_not(
    world: World, monkeypatch: pytest.MonkeyPatch, outage: Callable[[Callable[..., None]], Callable[..., None]]
):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    world.admit(1, step()[0])
    with monkeypatch.context() as patch:
        patch.setattr(worker.runner._oplog, "commit", outage(worker.runner._oplog.commit))
        with pytest.raises(Requeue, match="may or may not have happened"):
            worker.handle(1)
    assert trained(world) == (BATCH_TOKENS if outage is lost_answer else 0)
    for name in ("a/2", "a/3"):
        world.client.delete(keys.lease(MODEL))
        assert world.worker(name).handle(1) is not None
    assert trained(world) == BATCH_TOKENS


def test_each_op_of_a_shared_pass_counts_its_own(world: World, merging: Worker):
    for model_id in (A, B, C):
        admit_to(world, model_id, 1, gradient(1))
    recorder = PassRecorder(merging)
    handle(merging, A, 1)
    assert recorder.passes == [{A, B, C}]
    assert trained(world) == 3 * BATCH_TOKENS


def test_a_sample_counts_its_prompt_and_all_it_drew_and_once(world: World, backend: SamplerBackend):
    """The sample's first worker died."""
    request = admit(world, 0)
    world.oplog.claim_sample(request, "dead/1")
    world.client.delete(keys.lease(request))
    for name in ("s/1", "s/2"):
        assert runner(world, backend, name).handle(request, SESSION, "sample") is not None
    found = {name.split(" ")[0]: amount for name, amount in used(world.client).items()}
    assert found.pop("sampling_sample") == REQUEST.num_samples * REQUEST.max_tokens
    assert sum(found.values()) == len(REQUEST.prompt)
    assert found.keys() <= {"sampling_prefill", "sampling_prefill_cached"}
