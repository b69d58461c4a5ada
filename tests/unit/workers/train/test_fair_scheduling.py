"""Several projects on one trainer: each has its share of the time, for any number of models and calls of the others."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.domain import ops
from app.domain.accounts import Project
from app.domain.ops import Batch, ForwardBackward, Ragged
from app.errors import Requeue
from app.stores.redis import keys
from app.stores.redis.records import dump
from app.stores.redis.types import Lease
from tests.unit.workers.conftest import MODEL, PROBE, Worker, World, add_model, batch, step
from tests.unit.workers.train.test_scheduler import MERGED, admit, applied, handle
from workers.process import liveness
from workers.train import owner, runner
from workers.train.executor import GradAccumulation

HEAVY = [f"session:train:{i}" for i in range(1, 5)]
LIGHT, OTHER = "session:train:8", "session:train:9"


class Clock:
    """The scheduler's clock. It advances by a microsecond at each reading, so that no two times are equal."""

    now = 1000.0

    def monotonic(self) -> float:
        self.now += 1e-6
        return self.now

    def time(self) -> float:
        return self.monotonic()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (runner, owner, liveness):
        monkeypatch.setattr(module, "time", clock)
    return clock


class Passes:
    """The models of each pass, in order; a pass takes a second, or the `seconds` of one of its models."""

    def __init__(self, worker: Worker, clock: Clock, seconds: Mapping[str, float] = {}) -> None:
        self._inner, self._clock, self._seconds = worker.backend, clock, seconds
        self.ran = list[set[str]]()
        object.__setattr__(worker.runner._committer._executor, "backend", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def apply(self, ops: Mapping[str, Any]) -> Any:
        self.ran.append(set(ops))
        self._clock.now += max(self._seconds.get(model, 1.0) for model in ops)
        return self._inner.apply(ops)

    def of(self, project: set[str]) -> list[int]:
        """The indices of the passes with one of these models."""
        return [at for at, models in enumerate(self.ran) if models & project]


def project_of(world: World, name: str, *models: str) -> None:
    for model_id in models:
        add_model(world, model_id, name)


def _thrice(batch: Batch) -> tuple[Ragged, dict[str, Ragged]]:
    rows = [list(ragged) * 3 for ragged in (batch.tokens, batch.inputs["target_tokens"])]
    return Ragged.of(rows[0], np.int32), {"target_tokens": Ragged.of(rows[1], np.int64)}


def fill(world: World, *models: str, calls: int) -> None:
    for model_id in models:
        for seq in range(1, calls + 1):
            admit(world, model_id, seq, PROBE)


def own(worker: Worker, *models: str) -> None:
    for model_id in models:
        handle(worker, model_id, 0, "create_model")


def dispatch_in_order(worker: Worker, models: list[str], calls: int) -> None:
    for model_id, seq in itertools.product(models, range(1, calls + 1)):
        with suppress(Requeue):
            handle(worker, model_id, seq, "forward")


@pytest.fixture
def worker(world: World) -> Worker:
    for model_id in (MODEL, *HEAVY, LIGHT, OTHER):
        world.worker("a/0").backend.close(model_id)
    return world.worker("a/1")


def test_a_project_with_four_models_is_served_no_more_often_than_one_with_a_single_one(
    world: World, worker: Worker, clock: Clock
):
    project_of(world, "heavy", *HEAVY)
    project_of(world, "light", LIGHT)
    own(worker, *HEAVY, LIGHT)
    fill(world, *HEAVY, LIGHT, calls=6)
    passes = Passes(worker, clock)
    dispatch_in_order(worker, HEAVY, 6)
    lights = passes.of({LIGHT})
    assert len(lights) == 6, "all without a dispatch of its own"
    assert max(b - a for a, b in itertools.pairwise([-1, *lights])) <= 2, "every second turn is its"
    assert applied(world, HEAVY[-1]) == 6
    assert {Counter(model for ran in passes.ran for model in ran)[name] for name in HEAVY} == {6}


def test_passes_are_in_proportion_to_the_weights(world: World, worker: Worker, clock: Clock):
    world.records.put(Project.namespace, "light", dump(Project("light", "", "light", 0.0, limits={"weight": 3.0})))
    project_of(world, "heavy", *HEAVY)
    project_of(world, "light", LIGHT)
    own(worker, *HEAVY, LIGHT)
    fill(world, *HEAVY, calls=3)
    fill(world, LIGHT, calls=12)
    passes = Passes(worker, clock)
    dispatch_in_order(worker, HEAVY, 3)
    assert 11 <= len([at for at in passes.of({LIGHT}) if at < 16]) <= 12, "three of four, as long as it has any"


def test_an_idle_project_has_no_credit_for_it(world: World, worker: Worker, clock: Clock):
    project_of(world, "heavy", HEAVY[0])
    project_of(world, "light", LIGHT)
    own(worker, HEAVY[0], LIGHT)
    fill(world, HEAVY[0], calls=30)
    # With equal passes the projects' times would be equal, and a microsecond of another thread would choose the next.
    passes = Passes(worker, clock, {LIGHT: 1.01})
    for seq in range(1, 21):
        handle(worker, HEAVY[0], seq, "forward")
    fill(world, LIGHT, calls=10)
    for seq in range(21, 31):
        handle(worker, HEAVY[0], seq, "forward")
    heavies = [at for at in passes.of({HEAVY[0]}) if at >= 20]
    assert max(b - a for a, b in itertools.pairwise([19, *heavies])) <= 2, "they take turns, twenty passes behind"


def test_a_shared_pass_is_charged_to_each_project_by_its_bytes(world: World, clock: Clock):
    worker = world.worker("a/1", merged_tokens=MERGED)
    project_of(world, "heavy", HEAVY[0])
    project_of(world, "light", LIGHT)
    own(worker, MODEL, HEAVY[0], LIGHT)
    thrice = ForwardBackward(Batch(*_thrice(batch())), "cross_entropy", forward_only=True)
    admit(world, HEAVY[0], 1, thrice)
    admit(world, LIGHT, 1, PROBE)
    passes = Passes(worker, clock)
    fair_queue = worker.runner._scheduler._fair_queue
    before = fair_queue.virtual_time("light")
    handle(worker, HEAVY[0], 1, "forward")
    assert passes.ran == [{HEAVY[0], LIGHT}]
    part = len(ops.encode(PROBE)) / len(ops.encode(PROBE) + ops.encode(thrice))
    assert part < 0.4
    assert fair_queue.virtual_time("light") - before == pytest.approx(part, abs=0.02)


def test_an_unowned_model_waits_for_the_scheduler_and_not_for_its_dispatch(world: World, worker: Worker, clock: Clock):
    project_of(world, "heavy", *HEAVY)
    own(worker, *HEAVY)
    fill(world, *HEAVY, calls=6)
    passes = Passes(worker, clock)
    handle(worker, HEAVY[0], 1, "forward")
    project_of(world, "light", LIGHT, OTHER)
    fill(world, LIGHT, OTHER, calls=2)
    dispatch_in_order(worker, HEAVY, 6)
    assert passes.of({LIGHT, OTHER})[0] <= 2, "though the light one was never dispatched"
    assert max(b - a for a, b in itertools.pairwise(passes.of({LIGHT, OTHER}))) <= 2
    assert (applied(world, LIGHT), applied(world, OTHER)) == (2, 2)


def test_a_projects_own_unowned_models_wait_for_their_dispatches(world: World, worker: Worker):
    """A project that uses more models than a trainer holds would evict one model for each other one."""
    project_of(world, "heavy", *HEAVY[:2])
    own(worker, HEAVY[0])
    fill(world, HEAVY[0], calls=5)
    for seq in range(1, 6):
        handle(worker, HEAVY[0], seq, "forward")
    assert HEAVY[1] not in worker.owner.residents()


def test_unowned_models_are_looked_for_beside_a_single_model_too(world: World, worker: Worker):
    project_of(world, "light", LIGHT)
    own(worker, MODEL)
    assert [head.model_id for head in world.oplog.unowned("train.base")] == [LIGHT]
    assert [head.model_id for head in worker.runner._scheduler.waiting()] == [LIGHT]


def test_an_op_whose_start_fails_is_tried_once_a_round_not_for_ever(world: World, worker: Worker):
    """The model is lost between the scheduler's reading and its turn. Its own dispatch handles that."""
    project_of(world, "light", LIGHT)
    project_of(world, "heavy", HEAVY[0])
    own(worker, HEAVY[0])
    fill(world, HEAVY[0], calls=2)
    world.client.set(keys.lease(LIGHT), "b/1")
    head = world.oplog.heads({LIGHT: 0})[0]
    worker.runner._scheduler._backlog_scan = SimpleNamespace(heads=lambda: [head])
    for seq in (1, 2):
        assert handle(worker, HEAVY[0], seq, "forward") is not None
    assert ("create_model", f"{LIGHT}:0", "train.base@b") in worker.dispatched


def test_a_model_of_another_project_now_counts_for_that_one(world: World, worker: Worker, clock: Clock):
    project_of(world, "heavy", *HEAVY[:2])
    own(worker, *HEAVY[:2])
    world.client.hset(keys.model(HEAVY[1]), "owner", json.dumps("light"))
    fill(world, *HEAVY[:2], calls=1)
    Passes(worker, clock)
    handle(worker, HEAVY[1], 1, "forward")
    assert worker.runner._scheduler._fair_queue._virtual_times["light"] >= 1.0


def test_restoring_a_model_is_charged_to_its_project(
    world: World, worker: Worker, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    project_of(world, "heavy", HEAVY[0])
    own(worker, HEAVY[0])
    for seq, op in enumerate(step(), 1):
        admit(world, HEAVY[0], seq, op)
    handle(worker, HEAVY[0], 2)
    worker.owner.discard(HEAVY[0])
    restore = worker.owner._restore

    def restored(lease: Lease) -> GradAccumulation:
        clock.now += 0.5
        return restore(lease)

    monkeypatch.setattr(worker.owner, "_restore", restored)
    admit(world, HEAVY[0], 3, PROBE)
    Passes(worker, clock)
    handle(worker, HEAVY[0], 3, "forward")
    assert worker.runner._scheduler._fair_queue._virtual_times["heavy"] == pytest.approx(0.5 + 3 + 1, abs=0.01), (
        "the replay's too"
    )


def test_a_worker_that_is_about_to_end_serves_nobody_before_a_dispatch(world: World, worker: Worker, clock: Clock):
    """Passes of other models may take long, and the worker ends only after the present dispatch."""
    project_of(world, "heavy", HEAVY[0])
    project_of(world, "light", LIGHT)
    own(worker, HEAVY[0], LIGHT)
    fill(world, HEAVY[0], LIGHT, calls=3)
    passes = Passes(worker, clock)
    handle(worker, HEAVY[0], 1, "forward")
    ran = len(passes.ran)
    worker.runner.leave()
    with pytest.raises(Requeue, match="about to end"):
        handle(worker, HEAVY[0], 2, "forward")
    assert len(passes.ran) == ran
    handle(worker, LIGHT, applied(world, LIGHT) + 1, "forward")
    assert len(passes.ran) == ran + 1, "what is at its turn runs"
