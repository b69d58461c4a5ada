"""Usage of a run and its samples is counted as if nothing had died, been replayed or been run together."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import redis

from app.domain.ops import Batch, ForwardBackward, Ragged, SaveWeights
from app.errors import Requeue, UserOpError
from app.stores.redis import keys
from tests.pages import device_ms, used, used_by_runs
from tests.unit.workers.conftest import MODEL, Worker, World, batch, step
from tests.unit.workers.sample.test_runner import REQUEST, SESSION, admit, backend, runner
from tests.unit.workers.train.test_scheduler import (
    MERGED,
    A,
    B,
    C,
    PassRecorder,
    gradient,
    handle,
    infinite_ratio,
    merging,
    worker_of,
)
from tests.unit.workers.train.test_scheduler import admit as admit_to
from workers.backends.sampling.base import SamplerBackend
from workers.train import committer

__all__ = ["backend", "merging"]
BATCH_TOKENS = 19
TRAINED = "training session base"


def repeated(times: int) -> Batch:
    """The tokens of `batch(1)` so many times."""
    one = batch(1)
    rows, targets = (list(each) * times for each in (one.tokens, one.inputs["target_tokens"]))
    return Batch(Ragged.of(rows, np.int32), {"target_tokens": Ragged.of(targets, np.int64)})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which every pass takes a second."""
    monkeypatch.setattr(committer, "time", SimpleNamespace(monotonic=count().__next__))


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


@pytest.mark.usefixtures("clock")
def test_replays_count_nothing(world: World):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    for seq, op in enumerate([*step(0), *step(1), *step(2)], 1):
        world.admit(seq, op)
        worker = world.worker(f"a/{seq}")  # the worker before died, and the whole journal is replayed
        worker.handle(seq, op.kind)
    assert trained(world) == 3 * BATCH_TOKENS
    assert device_ms(world.client) == 7 * 1000, "the creation, three batches and three steps"


def test_a_failed_batch_counts_nothing(world: World, monkeypatch: pytest.MonkeyPatch):
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    world.admit(1, step()[0])
    monkeypatch.setattr(worker.backend, "apply", lambda ops: dict.fromkeys(ops, UserOpError("infinite")))
    before = device_ms(world.client)
    result = worker.handle(1)
    assert result is not None and result.failed
    assert (trained(world), device_ms(world.client)) == (0, before)


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
        sampler = runner(world, backend, name, tensor_parallel=2)
        sampler._device_clock._now = count().__next__  # a second passes between its entry and its end
        assert sampler.handle(request, SESSION, "sample") is not None
    found = {name.split(" ")[0]: amount for name, amount in used(world.client).items()}
    assert found.pop("sampling_sample") == REQUEST.num_samples * REQUEST.max_tokens
    assert sum(found.values()) == len(REQUEST.prompt)
    assert found.keys() <= {"sampling_prefill", "sampling_prefill_cached"}
    assert device_ms(world.client) == 2 * 1000, "a second of each device"
    assert not used_by_runs(world.client), "a sample of the base model"


@pytest.mark.usefixtures("clock", "merging")
def test_the_time_of_a_shared_pass_is_divided_by_tokens_and_counts_each_device(world: World):
    """A second process takes over the open backend of the node, with settings of four ranks."""
    trainer = world.base.trainer.model_copy(update={"ranks": 4})
    world.base = world.base.model_copy(update={"trainer": trainer})
    worker = worker_of(world, "a/2", merged_tokens=MERGED)
    before = used_by_runs(world.client)
    for model_id, sequences in ((A, 1), (B, 1), (C, 2)):
        admit_to(world, model_id, 1, ForwardBackward(repeated(sequences), "cross_entropy"))
    recorder = PassRecorder(worker)
    handle(worker, A, 1)
    for model_id in (A, B, C):
        admit_to(world, model_id, 2, step()[1])
    handle(worker, A, 2, "optim_step")
    assert recorder.passes == [{A, B, C}] * 2
    after = {name: amount - before.get(name, 0) for name, amount in used_by_runs(world.client).items()}
    steps = round(4000 / 3)
    assert {model_id: after[f"device {model_id} base"] for model_id in (A, B, C)} == {
        A: 1000 + steps,
        B: 1000 + steps,
        C: 2000 + steps,
    }
    assert after[f"training {C} base"] == 2 * after[f"training {A} base"]


@pytest.mark.usefixtures("clock")
def test_nobody_pays_for_an_op_that_failed_in_a_shared_pass(world: World, merging: Worker):
    before = device_ms(world.client)
    for model_id in (A, B, C):
        admit_to(world, model_id, 1, infinite_ratio() if model_id == B else gradient(1))
    recorder = PassRecorder(merging)
    handle(merging, A, 1)
    assert recorder.passes == [{A, B, C}]
    assert device_ms(world.client) - before == 2 * round(1000 / 3)
    assert not [name for name in used_by_runs(world.client) if name.startswith(f"training {B}")]
