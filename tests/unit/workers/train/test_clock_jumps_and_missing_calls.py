"""Clocks that jump change nothing. A call that never comes is given up, and one that comes late closes its gap."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from app.domain.ops import SaveWeights
from app.domain.results import Result
from app.errors import BadRequest
from app.settings import EngineSettings
from app.stores.redis import keys
from tests.property.vector_backend import backward, optim_step
from tests.property.world import CREATE, MODEL, Process, TrainerWorld
from workers.maintenance.redispatch import Redispatcher

RUN = [CREATE, backward(1), optim_step(), backward(3), SaveWeights("weights", "kept"), optim_step(), backward(6)]
HOUR_S = 3600.0


@pytest.fixture
def world(client: redis.Redis, tmp_path: Path) -> Iterator[TrainerWorld]:
    world = TrainerWorld(client, tmp_path)
    yield world
    world.stop()


def results(world: TrainerWorld) -> list[Result | None]:
    return [world.result(seq) for seq in range(len(RUN))]


def test_clocks_that_jump_by_an_hour_change_no_lease_no_order_and_no_result(
    client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    undisturbed = TrainerWorld(client, tmp_path / "undisturbed")
    for seq, op in enumerate(RUN):
        undisturbed.admit(seq, op)
    undisturbed.trainer("a").send(len(RUN) - 1)
    expected = results(undisturbed)
    undisturbed.stop()

    world = TrainerWorld(client, tmp_path / "jumping")
    first, other = world.trainer("a"), world.trainer("b")
    true_time = time.time
    for seq, op in enumerate(RUN):
        jump = HOUR_S * (1, -1, 0)[seq % 3]
        monkeypatch.setattr(time, "time", lambda jump=jump: true_time() + jump)
        world.admit(seq, op)
        first.parts.keeper._renew()
        assert first.send(seq) is not None
        assert other.send(seq) is None, "the first one's lease holds"
        assert client.pttl(keys.lease(MODEL)) > 0.9 * 1000 * world.settings.lease_s
    assert results(world) == expected
    assert client.hget(keys.model(MODEL), "epoch") == b"1"
    world.stop()


def waiting_at_a_gap(world: TrainerWorld) -> Process:
    """Seq 2 is missing. The other part of its batch, its step and the next batch wait."""
    trainer = world.trainer("a")
    for seq, op in ((0, CREATE), (1, backward(1)), (3, backward(3)), (4, optim_step()), (5, backward(5))):
        world.admit(seq, op)
    for seq in (1, 4, 5):
        trainer.send(seq)
    assert world.applied() == 1
    return trainer


def give_up(world: TrainerWorld, gap_s: float, until: int) -> None:
    """Sweeps until seq `until` is given up."""
    redispatcher = Redispatcher(
        world.oplog, lambda *send: None, EngineSettings(gap_s=gap_s, ring_again_s=1e9), world.client
    )
    world.oplog.take_calls(600)
    deadline = time.monotonic() + 60
    while world.oplog.entry(MODEL, until) is None:
        assert time.monotonic() < deadline
        redispatcher.sweep()
        time.sleep(0.02)


def test_a_call_that_is_withheld_and_then_comes_closes_its_gap(world: TrainerWorld):
    trainer = waiting_at_a_gap(world)
    Redispatcher(world.oplog, lambda *send: None, EngineSettings(gap_s=1e9), world.client).sweep()
    world.admit(2, backward(2))
    trainer.send(2)
    assert trainer.dispatched == [f"{MODEL}:4", f"{MODEL}:5"]
    trainer.send(5)
    assert (trainer.backend.states[MODEL].steps, trainer.backend.states[MODEL].pending) == ([[1, 2, 3]], [5])


def test_a_call_that_never_comes_ends_in_errors_that_name_it_and_the_run_goes_on(world: TrainerWorld):
    trainer = waiting_at_a_gap(world)
    give_up(world, gap_s=0.2, until=2)
    trainer.send(5)
    lost = [json.loads(result.body) for seq in (3, 4) if (result := world.result(seq)) is not None]
    assert [error["category"] for error in lost] == ["user", "user"]
    assert all("seq_id 2 did not arrive" in error["error"] for error in lost)
    with pytest.raises(BadRequest, match="seq_id 2 was refused"):
        world.admit(2, backward(2))
    world.admit(6, optim_step())
    assert trainer.send(6) is not None
    assert (trainer.backend.states[MODEL].steps, world.oplog.pending()) == ([[5]], [])
