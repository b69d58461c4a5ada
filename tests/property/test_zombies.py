"""A worker sleeps past its lease, at each point of an Op, and resumes when another has finished the run.

The backend is noisy: a zombie's own results are never the visible ones, so a missing guard cannot hide.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from app.domain.checkpoints import MANIFEST
from app.stores.redis import keys
from tests.property.faults import Fault
from tests.property.vector_backend import backward, optim_step
from tests.property.world import CREATE, MODEL, TrainerWorld

# The first worker sleeps in the step at seq 2; the complete run is up to seq 6.
RUN = [CREATE, backward(1), optim_step(), backward(2), backward(3), optim_step(), backward(4)]
SLEPT_AT, LAST = 2, 6
POINTS = {
    "before the run": (Fault.SLEEPS_BEFORE, "oplog.next"),
    "running": (Fault.SLEEPS_BEFORE, "backend.apply"),
    "before the commit": (Fault.SLEEPS_BEFORE, "oplog.commit"),
    "in the commit": (Fault.SLEEPS_AFTER, "oplog.commit"),
    "in the snapshot's upload": (Fault.SLEEPS_AFTER, "store.put_new"),
    "before the snapshot's pointer": (Fault.SLEEPS_BEFORE, "oplog.set_snapshot"),
}


@pytest.fixture
def world(client: redis.Redis, tmp_path: Path) -> Iterator[TrainerWorld]:
    world = TrainerWorld(client, tmp_path, random.Random(1))
    for seq, op in enumerate(RUN):
        world.admit(seq, op)
    yield world
    world.stop()


def visible(world: TrainerWorld) -> dict[str, Any]:
    """All state that others can see: results, the journal's head, and the objects its snapshot refers to."""
    head = world.client.hgetall(keys.model(MODEL))
    prefix = head[b"snapshot"].decode()
    files = world.store.list(f"{prefix}/")
    assert f"{prefix}/{MANIFEST}" in files
    return {
        "results": [world.result(seq) for seq in range(LAST + 1)],
        "head": head,
        "journal": [world.oplog.entry(MODEL, seq) for seq in range(LAST + 1)],
        "objects": {key: world.store.read(key) for key in files},
    }


@pytest.mark.parametrize("point", POINTS)
def test_a_zombie_changes_nothing_that_can_be_seen(world: TrainerWorld, point: str):
    first, second = world.trainer("a"), world.trainer("b")
    first.send(SLEPT_AT - 1)
    seen: dict[str, Any] = {}

    def others_finish() -> None:
        world.lapse()
        second.send(LAST)
        assert world.applied() == LAST
        seen.update(visible(world))

    fault, call = POINTS[point]
    first.faults.plan(fault, call, others_finish)
    first.send(SLEPT_AT)
    assert world.hit[fault] == 1, "it slept"
    assert visible(world) == seen
    first.send(LAST)
    assert visible(world) == seen
    assert second.backend.states[MODEL].steps == [[1], [2, 3]]
    assert second.backend.states[MODEL].pending == [4]


@pytest.mark.parametrize("point", POINTS)
def test_a_zombie_that_owns_the_model_again_goes_on_from_what_was_committed(world: TrainerWorld, point: str):
    first, second = world.trainer("a"), world.trainer("b")
    first.send(SLEPT_AT - 1)

    def others_go_on() -> None:
        world.lapse()
        second.send(LAST - 2)

    fault, call = POINTS[point]
    first.faults.plan(fault, call, others_go_on)
    first.send(SLEPT_AT)
    before = [world.result(seq) for seq in range(LAST - 1)]
    world.lapse()
    for _ in range(2):  # the first worker may be fenced
        first.send(LAST)
    assert world.applied() == LAST
    assert [world.result(seq) for seq in range(LAST - 1)] == before
    assert first.backend.states[MODEL].steps == [[1], [2, 3]]
    assert first.backend.states[MODEL].pending == [4]
