"""Scheduler of several models on one worker: the next model, and the Ops that share a pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import redis

from app import ids
from app.domain import ops
from app.domain.ops import Batch, ForwardBackward, Op, Ragged
from app.domain.results import Result
from app.errors import Requeue
from app.stores.redis import keys
from app.stores.redis.types import Entry, Lease
from tests.unit.workers.conftest import (
    BASE,
    HOUR_S,
    LORA,
    MODEL,
    PROBE,
    Worker,
    World,
    add_model,
    batch,
    logprob_bytes,
    step,
)
from workers.backends.training.base import Create
from workers.train import scheduler

A, B, C = MODEL, "session:train:1", "session:train:2"
MERGED = 8192


class PassRecorder:
    """Records the models of each pass; `poison` breaks every pass in which this model has a forward_backward."""

    def __init__(self, worker: Worker, poison: str = "") -> None:
        self._inner, self._poison = worker.backend, poison
        self.passes: list[set[str]] = []
        object.__setattr__(worker.runner._committer._executor, "backend", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def apply(self, ops: Mapping[str, Any]) -> Any:
        self.passes.append(set(ops))
        if isinstance(ops.get(self._poison), ForwardBackward):
            raise RuntimeError("illegal memory access")
        return self._inner.apply(ops)


def worker_of(world: World, name: str, *, merged_tokens: int = 0, wait_s: float = 0.0) -> Worker:
    """A worker that owns A, B and C."""
    worker = world.worker(name, merged_tokens=merged_tokens, wait_s=wait_s)
    for model_id in (A, B, C):
        worker.backend.close(model_id)
        if not world.client.exists(keys.model(model_id)):
            add_model(world, model_id)
        handle(worker, model_id, 0, "create_model")
    return worker


def handle(worker: Worker, model_id: str, seq: int, kind: str = "forward_backward") -> Result | None:
    return worker.runner.handle(ids.request_id(model_id, seq), model_id, kind)


def admit(world: World, model_id: str, seq: int, op: Op) -> None:
    payload = ops.encode(op)
    world.oplog.admit(model_id, seq, op.kind, payload, ops.digest(payload))


def applied(world: World, model_id: str) -> int:
    return int(world.client.hget(keys.model(model_id), "applied"))


def gradient(seed: int) -> Op:
    return step(seed)[0]


@pytest.fixture
def merging(world: World) -> Worker:
    return worker_of(world, "a/1", merged_tokens=MERGED)


def test_what_waits_in_several_models_shares_a_pass(world: World, merging: Worker):
    for model_id in (A, B, C):
        admit(world, model_id, 1, gradient(1))
    recorder = PassRecorder(merging)
    first = handle(merging, A, 1)
    assert recorder.passes == [{A, B, C}]
    assert [handle(merging, model_id, 1) for model_id in (B, C)] == [first, first]
    assert len(recorder.passes) == 1, "the dispatches of the others find their results"


def test_with_exact_every_op_has_a_pass_of_its_own(world: World):
    worker = worker_of(world, "a/1")
    for model_id in (A, B, C):
        admit(world, model_id, 1, gradient(1))
    recorder = PassRecorder(worker)
    for model_id in (A, B, C):
        handle(worker, model_id, 1)
    assert sorted(map(sorted, recorder.passes)) == [[A], [B], [C]]


@pytest.mark.parametrize("merged_tokens", [0, MERGED])
def test_no_model_waits_for_another_twice(world: World, merged_tokens: int):
    worker = worker_of(world, "a/1", merged_tokens=merged_tokens)
    for seq in range(1, 5):
        admit(world, A, seq, gradient(seq))
    recorder = PassRecorder(worker)
    handle(worker, A, 1)
    admit(world, B, 1, gradient(1))
    for seq in range(2, 5):
        handle(worker, A, seq)
    assert [ops for ops in recorder.passes if B in ops], "B ran without a dispatch of its own"
    assert B in set.union(*recorder.passes[:2]), "and waited for one Op of A alone"
    assert applied(world, A) == 4


def test_what_is_over_the_budget_does_not_join(world: World):
    # The batch has 19 tokens; 16 bytes each.
    worker = worker_of(world, "a/1", merged_tokens=40)
    size = len(ops.encode(gradient(1)))
    assert 16 * 40 // size == 1, "the budget holds one Op beside the first, not two"
    for model_id in (A, B, C):
        admit(world, model_id, 1, gradient(1))
    recorder = PassRecorder(worker)
    handle(worker, A, 1)
    assert recorder.passes == [{A, B}]


def test_kinds_do_not_mix(world: World, merging: Worker):
    admit(world, A, 1, gradient(1))
    admit(world, B, 1, PROBE)
    admit(world, C, 1, step()[1])
    recorder = PassRecorder(merging)
    for model_id, kind in ((A, "forward_backward"), (B, "forward"), (C, "optim_step")):
        handle(merging, model_id, 1, kind)
    assert sorted(map(sorted, recorder.passes)) == [[A], [B], [C]]


def test_an_op_that_cannot_begin_keeps_no_other_from_its_pass(
    world: World, merging: Worker, monkeypatch: pytest.MonkeyPatch
):
    for model_id in (A, B, C):
        admit(world, model_id, 1, gradient(1))
    recorder, begin = PassRecorder(merging), merging.parts.oplog.next

    def away_for_b(lease: Lease, seq: int) -> Entry | None:
        if lease.model_id == B:
            raise redis.ConnectionError
        return begin(lease, seq)

    monkeypatch.setattr(merging.parts.oplog, "next", away_for_b)
    handle(merging, A, 1)
    assert recorder.passes == [{A, C}]


def test_an_op_that_breaks_its_pass_takes_no_other_with_it(world: World, merging: Worker):
    for model_id in (A, B, C):
        admit(world, model_id, 1, gradient(1))
    recorder = PassRecorder(merging, poison=B)
    with pytest.raises(Requeue):
        handle(merging, A, 1)
    assert recorder.passes == [{A, B, C}]
    for model_id in (A, B, C):
        assert world.client.hget(keys.op(f"{model_id}:1"), "attempts") == b"1"
    for _ in range(2):
        for model_id in (A, B, C):
            try:
                handle(merging, model_id, 1)
            except Requeue:
                continue
    outcomes = {model_id: handle(merging, model_id, 1) for model_id in (A, B, C)}
    assert [bool(result and result.failed) for result in outcomes.values()] == [False, True, False]
    assert all(len(ops) == 1 for ops in recorder.passes[1:]), "begun once and not ended, each runs alone"


def test_a_batch_behind_a_step_joins_the_pass_too(world: World, merging: Worker):
    for seq, op in enumerate([*step(1), gradient(2)], 1):
        admit(world, B, seq, op)
    handle(merging, B, 1)
    admit(world, A, 1, gradient(1))
    recorder = PassRecorder(merging)
    handle(merging, A, 1)
    assert recorder.passes == [{B}, {A, B}], "the step of B, then both batches"


def test_a_pass_waits_for_the_next_op_of_a_model_that_was_served_lately(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scheduler, "_RECENT_S", HOUR_S)
    worker = worker_of(world, "a/1", merged_tokens=MERGED, wait_s=60.0)
    for model_id in (B, C):
        admit(world, model_id, 1, gradient(1))
    admit(world, A, 1, gradient(1))
    handle(worker, A, 1)
    recorder = PassRecorder(worker)
    for model_id in (A, B):
        admit(world, model_id, 2, gradient(2))
    late = threading.Timer(0.05, admit, (world, C, 2, gradient(2)))
    late.start()
    handle(worker, A, 2)
    assert recorder.passes == [{A, B, C}]


def test_behind_a_long_pass_the_next_waits_for_longer(world: World, monkeypatch: pytest.MonkeyPatch):
    """The wait is a fifth of the pass, because a model that comes too late costs another pass."""
    worker = worker_of(world, "a/1", merged_tokens=MERGED, wait_s=1e-6)
    for model_id in (A, B, C):
        admit(world, model_id, 1, gradient(1))
    recorder = PassRecorder(worker)
    took = worker.runner._scheduler.charge
    monkeypatch.setattr(worker.runner._scheduler, "charge", lambda ran, _: took(ran, 300.0))
    handle(worker, A, 1)
    for model_id in (A, B):
        admit(world, model_id, 2, gradient(2))
    late = threading.Timer(0.05, admit, (world, C, 2, gradient(2)))
    late.start()
    handle(worker, A, 2)
    assert recorder.passes == [{A, B, C}, {A, B, C}]


def test_no_pass_waits_for_a_model_that_was_quiet(world: World):
    worker = worker_of(world, "a/1", merged_tokens=MERGED, wait_s=120.0)
    for model_id in (B, C):
        worker.owner.residents()[model_id].served -= 1.5
    admit(world, A, 1, gradient(1))
    began = time.monotonic()
    assert handle(worker, A, 1) is not None
    assert time.monotonic() - began < 60


def test_an_op_that_broke_a_worker_waits_for_its_own_dispatch(world: World):
    worker = worker_of(world, "a/1")
    admit(world, B, 1, gradient(1))
    world.client.hset(keys.op(f"{B}:1"), "attempts", 1)
    for seq in (1, 2):
        admit(world, A, seq, gradient(seq))
    recorder = PassRecorder(worker)
    for seq in (1, 2):
        handle(worker, A, seq)
    assert recorder.passes == [{A}, {A}]
    handle(worker, B, 1)
    assert recorder.passes[-1] == {B}


@pytest.mark.parametrize("left_running", [A, B])
def test_an_op_that_another_process_left_running_runs_alone(world: World, merging: Worker, left_running: str):
    for model_id in (A, B):
        admit(world, model_id, 1, gradient(1))
    world.client.hset(keys.op(f"{left_running}:1"), "runner", "a/0")
    recorder = PassRecorder(merging)
    handle(merging, A, 1)
    assert recorder.passes == [{A}]


def test_a_fault_in_one_op_of_a_pass_is_its_own(world: World, merging: Worker):
    admit(world, A, 1, gradient(1))
    admit(world, B, 1, infinite_ratio())
    recorder = PassRecorder(merging)
    first = handle(merging, A, 1)
    assert recorder.passes == [{A, B}]
    second = world.oplog.outcome(ids.request_id(B, 1))
    assert first is not None and second is not None
    assert (first.failed, second.failed) == (False, True)


def test_a_model_that_was_lost_meanwhile_commits_nothing(world: World, merging: Worker):
    for model_id in (A, B):
        admit(world, model_id, 1, gradient(1))
    world.client.hincrby(keys.model(B), "epoch", 1)  # another worker owns it
    assert handle(merging, A, 1) is not None
    assert applied(world, B) == 0
    assert applied(world, A) == 1


def test_a_model_that_is_lost_in_the_pass_commits_nothing_and_the_others_do(world: World, merging: Worker):
    for model_id in (A, B):
        admit(world, model_id, 1, gradient(1))
    recorder = PassRecorder(merging)
    inner = recorder.apply

    def overtaken(ops: Mapping[str, Any]) -> Any:
        world.client.hincrby(keys.model(B), "epoch", 1)
        return inner(ops)

    recorder.apply = overtaken
    assert handle(merging, A, 1) is not None
    assert (applied(world, A), applied(world, B)) == (1, 0)
    assert B not in merging.owner.residents(), "its state holds an Op that was not committed"


def test_what_was_not_committed_is_thrown_away_when_a_commit_ends_oddly(
    world: World, merging: Worker, monkeypatch: pytest.MonkeyPatch
):
    for model_id in (A, B, C):
        admit(world, model_id, 1, gradient(1))
    commit = world.oplog.commit

    def odd(lease: Any, *rest: Any) -> None:
        if lease.model_id != B:
            raise MemoryError
        commit(lease, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(world.oplog, "commit", odd)
        with pytest.raises(MemoryError):
            handle(merging, A, 1)
    committed = {model_id for model_id in (A, B, C) if applied(world, model_id) == 1}
    assert set(merging.owner.residents()) == committed


def test_a_shared_pass_is_within_the_bound_of_running_alone(world: World, merging: Worker):
    for model_id, seed in ((A, 1), (B, 2), (C, 3)):
        admit(world, model_id, 1, gradient(seed))
        admit(world, model_id, 2, step()[1])
        admit(world, model_id, 3, PROBE)
    recorder = PassRecorder(merging)
    bodies = {}
    for seq, kind in ((1, "forward_backward"), (2, "optim_step"), (3, "forward")):
        for model_id in (A, B, C):
            bodies[model_id] = handle(merging, model_id, seq, kind)
    assert {A, B, C} in recorder.passes
    for model_id, seed in ((A, 1), (B, 2), (C, 3)):
        result = bodies[model_id]
        assert result is not None
        found, alone = _floats(logprob_bytes(result.body)), _alone(world, seed)
        assert abs(found - alone).max() <= 1e-5 * abs(alone).max()


def _alone(world: World, seed: int):
    backend = world.worker("reference/0").backend
    for op in [Create(LORA), gradient(seed), step()[1], PROBE]:
        output = backend.apply({"alone": op})["alone"]
    backend.close("alone")
    return output.logprobs.values


def _floats(data: bytes):
    return np.frombuffer(data, dtype=np.float32)


def infinite_ratio() -> Op:
    tokens, targets = batch(1).tokens, batch(1).inputs["target_tokens"]
    inputs = {
        "target_tokens": targets,
        "logprobs": Ragged.of([np.full(shape, -1e30) for shape in targets.shapes], np.float32),
        "advantages": Ragged.of([np.ones(shape) for shape in targets.shapes], np.float32),
    }
    return ForwardBackward(Batch(tokens, inputs), "importance_sampling")


def test_a_model_without_an_owner_joins_no_pass(world: World, merging: Worker):
    for model_id in (A, B):
        admit(world, model_id, 1, gradient(1))
    merging.owner.discard(B)
    assert [head.model_id for head in world.oplog.unowned(f"train.{BASE}")] == [B]
    recorder = PassRecorder(merging)
    handle(merging, A, 1)
    assert recorder.passes == [{A}]
