"""optim_steps of several models in one call of the backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from app.domain.ops import OptimStep
from tests.unit.workers.conftest import HOUR_S, PROBE, Worker, World, step
from tests.unit.workers.train.test_scheduler import (
    MERGED,
    A,
    B,
    C,
    PassRecorder,
    admit,
    applied,
    gradient,
    handle,
    infinite_ratio,
    worker_of,
)
from workers.train import scheduler

MODELS = (A, B, C)
_, STEP = step()


@pytest.fixture
def merging(world: World) -> Worker:
    return worker_of(world, "a/1", merged_tokens=MERGED)


def admit_steps(world: World, seq: int) -> None:
    """Admits a step of each model, with settings of its own."""
    assert isinstance(STEP, OptimStep)
    for number, model_id in enumerate(MODELS):
        admit(world, model_id, seq, OptimStep(replace(STEP.params, learning_rate=1e-2 * (1 + number))))


def trained(world: World, worker: Worker) -> PassRecorder:
    """Gives each model a gradient, from a pass of its own."""
    for number, model_id in enumerate(MODELS):
        admit(world, model_id, 1, gradient(number))
        handle(worker, model_id, 1)
    return PassRecorder(worker)


def state(worker: Worker, model_id: str, folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    worker.backend.capture(model_id, optimizer=True)(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_steps_that_wait_in_several_models_are_one_call(world: World, merging: Worker):
    recorder = trained(world, merging)
    admit_steps(world, 2)
    first = handle(merging, A, 2, "optim_step")
    assert recorder.passes == [set(MODELS)]
    results = [first, *(handle(merging, model_id, 2, "optim_step") for model_id in (B, C))]
    assert all(result is not None and not result.failed for result in results)
    assert len({result.body for result in results if result is not None}) == 3, "each has the result of its own step"
    assert [applied(world, model_id) for model_id in MODELS] == [2, 2, 2]
    assert len(recorder.passes) == 1, "the dispatches of the others find their results"


def test_with_exact_every_step_is_a_call_of_its_own(world: World):
    worker = worker_of(world, "a/1")
    recorder = trained(world, worker)
    admit_steps(world, 2)
    for model_id in MODELS:
        handle(worker, model_id, 2, "optim_step")
    assert sorted(map(sorted, recorder.passes)) == [[A], [B], [C]]


def test_a_step_waits_for_no_other(world: World, monkeypatch: pytest.MonkeyPatch):
    """Though the others were served lately, and send their steps as soon as they are looked for again."""
    monkeypatch.setattr(scheduler, "_RECENT_S", HOUR_S)
    worker = worker_of(world, "a/1", merged_tokens=MERGED, wait_s=60.0)
    for model_id in MODELS:
        admit(world, model_id, 1, gradient(1))
    handle(worker, A, 1)
    recorder = PassRecorder(worker)
    heads, looks = world.oplog.heads, count()

    def late(reached: Mapping[str, int]) -> Any:
        if next(looks) == 1:
            for model_id in (B, C):
                admit(world, model_id, 2, STEP)
        return heads(reached)

    monkeypatch.setattr(world.oplog, "heads", late)
    admit(world, A, 2, STEP)
    handle(worker, A, 2, "optim_step")
    assert recorder.passes == [{A}]


def test_a_replay_has_the_bits_of_steps_that_shared_a_call(world: World, merging: Worker, tmp_path: Path):
    """A replay runs each step alone."""
    recorder = trained(world, merging)
    admit_steps(world, 2)
    handle(merging, A, 2, "optim_step")
    assert recorder.passes == [set(MODELS)]
    live = {model_id: state(merging, model_id, tmp_path / f"{at} live") for at, model_id in enumerate(MODELS)}
    merging.owner.discard_all()
    for at, model_id in enumerate(MODELS):
        merging.owner.own(model_id)
        assert state(merging, model_id, tmp_path / f"{at} restored") == live[model_id]
    assert max(map(len, recorder.passes[1:])) == 1 and len(recorder.passes) > 1 + 2 * len(MODELS), "a replay"


def test_a_step_without_all_of_its_gradients_is_refused_beside_others(world: World, merging: Worker):
    for model_id in (A, C):
        admit(world, model_id, 1, gradient(1))
        handle(merging, model_id, 1)
    admit(world, B, 1, infinite_ratio())
    handle(merging, B, 1)
    for model_id in MODELS:
        admit(world, model_id, 2, gradient(2))
        handle(merging, model_id, 2)
    recorder = PassRecorder(merging)
    admit_steps(world, 3)
    for model_id, failed in ((A, False), (B, True), (C, False)):
        result = handle(merging, model_id, 3, "optim_step")
        assert result is not None and result.failed == failed
    assert recorder.passes == [{A, C}, {B}], "the step of A and C, and then the gradients of B are dropped"
    assert merging.backend.gradients(B) == {}


def test_a_step_that_fails_beside_others_drops_its_gradients(world: World, merging: Worker):
    recorder = trained(world, merging)
    one = merging.backend._states[B]
    one.restore_pending({name: torch.full_like(pending, 1e30) for name, pending in one.pending_gradients().items()})
    admit_steps(world, 2)
    for model_id, failed in ((A, False), (B, True), (C, False)):
        result = handle(merging, model_id, 2, "optim_step")
        assert result is not None and result.failed == failed
    assert recorder.passes == [set(MODELS), {B}], "all steps, and then the gradients of B are dropped"
    assert merging.backend.gradients(B) == {}


def test_batches_share_a_pass_behind_steps_that_shared_a_call(world: World, merging: Worker):
    recorder = trained(world, merging)
    admit_steps(world, 2)
    for model_id in MODELS:
        admit(world, model_id, 3, PROBE)
    handle(merging, A, 3, "forward")
    assert recorder.passes == [set(MODELS), set(MODELS)]
