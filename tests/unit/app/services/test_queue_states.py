"""Queue state of a pending future, and the low number of lookups it costs."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.domain.records import Model, Sampler, Worker
from app.services.queue import ACTIVE, QueueSnapshots, QueueState, QueueStates
from app.stores.redis.types import Future, ModelLine, Unfinished, WaitingSample

BASE = "org/base"
SAMPLE = Future("s:sample:0:1", "sample", "s:sample:0", "me", "pending", None)
STEP = Future("s:train:0:1", "optim_step", "s:train:0", "me", "pending", None)
FULL = Future("s:train:1:1", "optim_step", "s:train:1", "me", "pending", None)
FULL_SAMPLE = Future("s:sample:1:1", "sample", "s:sample:1", "me", "pending", None)
FUTURES = (SAMPLE, STEP, FULL, FULL_SAMPLE)
ALL = {(role, BASE) for role in ("sampler", "trainer", "full_trainer", "full_sampler")}


def equal(project: str) -> float:
    return 1.0


@pytest.fixture(autouse=True)
def lasting_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots of the queue stay valid, however slow the machine."""
    monkeypatch.setattr("app.services.queue._STATE_SNAPSHOT_AGE_S", 3600.0)


class World:
    """Workers and a store that count their reads."""

    def __init__(self) -> None:
        self.workers = set(ALL)
        self.lack = ""
        self.waiting = Unfinished([], [], {})
        self.snapshots = 0
        self.reads = 0
        self.records = {
            "s:sample:0": Sampler("me", "s", BASE, 0.0),
            "s:sample:1": Sampler("me", "s", BASE, 0.0, full=True),
            "s:train:0": Model("me", "s", BASE, 0.0),
            "s:train:1": Model("me", "s", BASE, 0.0, full=True),
        }

    def live(self) -> dict[str, Worker]:
        self.snapshots += 1
        return {role: Worker(role, base, {}, {}, "", 0.0, queue="q", pace_s=2.0) for role, base in self.workers}

    def unfinished(self, most: int) -> Unfinished:
        return self.waiting

    def shortage(self) -> str:
        return self.lack

    def find(self, cls: type, key: str) -> Sampler | Model | None:
        self.reads += 1
        return self.records.get(key)


class Workers:
    def __init__(self, world: World) -> None:
        self.workers = world.live


def states(world: World) -> QueueStates:
    return QueueStates(QueueSnapshots(Workers(world), world, world, equal), world)  # type: ignore[arg-type]


def test_with_its_worker_there_a_queue_is_active() -> None:
    found = states(World())
    assert {found.of(future) for future in FUTURES} == {ACTIVE}


@pytest.mark.parametrize(
    ("gone", "future", "reason"),
    [
        ("sampler", SAMPLE, f"no sampler of {BASE} is running"),
        ("trainer", STEP, f"no trainer of {BASE} is running"),
        ("full_trainer", FULL, f"no full trainer of {BASE} is running"),
        ("full_sampler", FULL_SAMPLE, f"no full sampler of {BASE} is running"),
    ],
)
def test_without_a_healthy_worker_only_what_it_would_run_is_paused(gone: str, future: Future, reason: str) -> None:
    world = World()
    world.workers.discard((gone, BASE))
    found = states(world)
    for other in FUTURES:
        assert found.of(other) == (QueueState("paused_capacity", reason) if other is future else ACTIVE)


def test_a_store_that_takes_nothing_in_pauses_everything_and_says_why() -> None:
    world = World()
    world.lack = "the state server has used engine.memory_share of its maxmemory"
    found = states(world).of(SAMPLE)
    assert found.name == "paused_capacity"
    assert world.lack in found.reason


def test_2000_polls_that_end_together_cost_one_snapshot_and_one_read_a_parent() -> None:
    world = World()
    found = states(world)
    for _ in range(1000):
        found.of(SAMPLE)
        found.of(STEP)
    assert (world.snapshots, world.reads) == (1, 2)


def test_5000_polls_for_a_model_each_read_none_of_them_twice() -> None:
    world = World()
    found = states(world)
    world.records = {f"s:train:{number}": Model("me", "s", BASE, 0.0) for number in range(5000)}
    for _ in range(2):
        for number in range(5000):
            found.of(Future(f"s:train:{number}:0", "optim_step", f"s:train:{number}", "me", "pending", None))
    assert world.reads == 5000


def test_a_snapshot_grows_old(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    found = states(world)
    monkeypatch.setattr("app.services.queue._STATE_SNAPSHOT_AGE_S", 0.0)
    assert found.of(SAMPLE) == ACTIVE
    world.workers.discard(("sampler", BASE))
    assert found.of(SAMPLE).name == "paused_capacity"


def test_while_one_poll_takes_a_snapshot_others_get_the_one_before() -> None:
    world, reading, done = World(), threading.Event(), threading.Event()
    found = states(world)
    found.of(SAMPLE)
    found._snapshots._taken_at = float("-inf")

    def slow(most: int) -> Unfinished:
        reading.set()
        assert done.wait(30)
        return world.waiting

    world.unfinished = slow  # type: ignore[method-assign]
    world.workers.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(found.of, SAMPLE)
        assert reading.wait(60)
        assert found.of(SAMPLE) == ACTIVE
        done.set()
        assert first.result().name == "paused_capacity"
    assert found.of(SAMPLE).name == "paused_capacity"


def test_an_outage_is_found_out_by_one_poll_not_by_all() -> None:
    world = World()
    found = states(world)
    found.of(SAMPLE)
    found._snapshots._taken_at = float("-inf")

    def away() -> str:
        raise ConnectionError("away")

    world.shortage = away  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        found.of(SAMPLE)
    assert found.of(SAMPLE) == ACTIVE


def test_nothing_is_said_to_be_missing_before_the_first_snapshot() -> None:
    world = World()
    found = states(world)
    there = world.shortage

    def away() -> str:
        raise ConnectionError("away")

    world.shortage = away  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        found.of(SAMPLE)
    world.shortage = there  # type: ignore[method-assign]
    assert found.of(SAMPLE) == ACTIVE


def test_a_waiting_call_learns_what_runs_before_it_and_for_how_long() -> None:
    world = World()
    world.waiting = Unfinished(
        [ModelLine("s:train:0", "me", "q", "trainer", 0, 1, False, True), _line("other:train:0", "you")],
        [WaitingSample("other:sample:0:1", "you", "s"), WaitingSample(SAMPLE.request_id, "me", "s")],
        {},
    )
    found = states(world)
    assert found.of(STEP).reason == "1 call runs before it, for about 2 s"
    assert (found.of(SAMPLE).name, found.of(SAMPLE).reason) == ("active", "1 call runs before it")


def test_a_reason_for_a_pause_is_shown_before_a_position() -> None:
    world = World()
    world.waiting = Unfinished([_line("s:train:0", "me")], [], {})
    world.workers.discard(("trainer", BASE))
    state = states(world).of(STEP)
    assert (state.name, state.reason) == ("paused_capacity", f"no trainer of {BASE} is running")
    assert state.position is not None


def _line(model_id: str, owner: str) -> ModelLine:
    return ModelLine(model_id, owner, "q", "trainer", 0, 3, False, True)
