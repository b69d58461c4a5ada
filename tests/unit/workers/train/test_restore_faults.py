"""Faults of a restore: a replay that breaks the backend, ends its process or lacks memory, and the pauses after it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import redis

from app.domain.ops import ForwardBackward
from app.domain.records import Model
from app.domain.results import Result
from app.errors import NoMemory, NotFound, OpError, Requeue, TinsmithError, Unavailable
from app.stores.redis import keys
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.types import Lease
from tests.unit.workers.conftest import (
    BASE,
    MODEL,
    Ended,
    Worker,
    World,
    add_model,
    step,
)
from workers.train import scheduler


class Dead(BaseException):
    """Raised where the process ends."""


class NoReplay:
    """A backend that cannot run a forward_backward."""

    def __init__(self, worker: Worker, error: BaseException) -> None:
        self._inner, self._error = worker.backend, error
        object.__setattr__(worker.runner._committer._executor, "backend", self)

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def apply(self, ops):
        if not any(isinstance(op, ForwardBackward) for op in ops.values()):
            return self._inner.apply(ops)
        if isinstance(self._error, OpError):
            return dict.fromkeys(ops, self._error)
        raise self._error


def fail_three_times(worker: Worker) -> None:
    """Makes the replay before seq 2 fail three times."""
    NoReplay(worker, RuntimeError("no memory on the device"))
    for _ in range(3):
        with pytest.raises(Requeue):
            worker.handle(2, "optim_step")


@pytest.fixture
def replay_alone(world: World) -> World:
    """seq 1, a gradient, is applied and has to be replayed; nothing waits."""
    first = world.worker("a/1")
    first.handle(0, "create_model")
    world.admit(1, step()[0])
    first.handle(1)
    first.drain.release()
    return world


@pytest.fixture
def replay_due(replay_alone: World) -> World:
    """As `replay_alone`, and seq 2 waits."""
    replay_alone.admit(2, step()[1])
    return replay_alone


def error_of(result: Result | None) -> str:
    assert result is not None and result.failed
    return str(json.loads(result.body)["error"])


def test_an_op_behind_a_replay_that_breaks_the_backend_is_given_up(replay_due: World):
    successor = replay_due.worker("b/1")
    fail_three_times(successor)
    assert "3 attempts" in error_of(successor.handle(2, "optim_step"))


def test_a_late_dispatch_answers_with_its_own_result_when_a_later_op_is_given_up(replay_due: World):
    successor = replay_due.worker("b/1")
    fail_three_times(successor)
    late = successor.handle(1)
    assert late == replay_due.oplog.outcome(f"{MODEL}:1")
    assert late is not None and not late.failed
    assert "3 attempts" in error_of(replay_due.oplog.outcome(f"{MODEL}:2"))


def test_an_op_behind_a_replay_that_kills_the_process_is_given_up(replay_due: World):
    for boot in range(3):
        successor = replay_due.worker(f"b/{boot}")
        NoReplay(successor, Dead())
        with pytest.raises(Dead):
            successor.handle(2, "optim_step")
    assert "3 attempts" in error_of(replay_due.worker("b/4").handle(2, "optim_step"))


def kill_by_restore(world: World) -> None:
    """Makes the restore before seq 2 end three workers."""
    for boot in range(3):
        successor = world.worker(f"b/{boot}")
        NoReplay(successor, Dead())
        with pytest.raises(Dead):
            successor.handle(2, "optim_step")


def test_after_three_workers_that_a_restore_ended_all_calls_of_the_model_fail_at_once(replay_due: World):
    for seq in (3, 4):
        replay_due.admit(seq, step()[0])
    kill_by_restore(replay_due)
    for boot, seq in ((4, 4), (5, 5)):
        if seq == 5:
            replay_due.admit(5, step()[0])  # a later call does not end three workers more
        survivor = replay_due.worker(f"b/{boot}")
        NoReplay(survivor, Dead())
        error = error_of(survivor.handle(seq))
        assert "3 workers ended while they restored it" in error and "from one of the run's checkpoints" in error
    assert "3 workers ended" in error_of(replay_due.oplog.outcome(f"{MODEL}:3"))


def test_a_model_whose_restores_ended_three_workers_fails_no_call_while_one_of_them_may_be_cut_off(replay_alone: World):
    for boot in range(3):
        successor = replay_alone.worker(f"b/{boot}")
        NoReplay(successor, Dead())
        with pytest.raises(Dead):
            successor.handle(1)
    replay_alone.admit(2, step()[1])
    replay_alone.client.delete(keys.lease(MODEL))
    with pytest.raises(Requeue, match="may still be alive without a connection"):
        replay_alone.worker("c/1").handle(2, "optim_step")
    assert replay_alone.oplog.outcome(f"{MODEL}:2") is None
    replay_alone.outlast_restore()
    assert "3 workers ended while they restored it" in error_of(replay_alone.worker("c/2").handle(2, "optim_step"))


def test_after_an_hour_or_a_restore_that_succeeds_the_restores_of_a_model_count_anew(replay_due: World):
    kill_by_restore(replay_due)
    restores = f"tinsmith:restore:{MODEL}"
    assert 3000 < replay_due.client.ttl(restores) <= 3600
    replay_due.client.expire(restores, 1000)
    replay_due.admit(3, step()[0])
    assert "3 workers ended" in error_of(replay_due.worker("b/4").handle(3))
    assert 400 < replay_due.client.ttl(restores) <= 1000, "a refusal does not prolong it"
    replay_due.client.delete(restores)
    replay_due.admit(4, step()[0])
    assert (result := replay_due.worker("b/5").handle(4)) is not None and not result.failed
    assert not replay_due.client.exists(restores)


def test_a_restore_that_fails_and_ends_no_worker_stops_no_later_call(replay_due: World):
    replay_due.admit(3, step()[0])
    successor = replay_due.worker("b/1")
    fail_three_times(successor)
    assert "3 attempts" in error_of(successor.handle(2, "optim_step"))
    later = replay_due.worker("b/2").handle(3)
    assert later is not None and "3 workers ended" not in str(later.body)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A list with one item: the time of the backoff."""
    now = [1000.0]
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def retried(worker: Worker) -> list[str]:
    """The calls that are dispatched again now."""
    worker.dispatched.clear()
    worker.retry_backoff.retry_due()
    return [request_id for _, request_id, _ in worker.dispatched]


def test_a_model_that_is_lost_is_not_restored_again_once_its_calls_have_failed(
    replay_due: World, now: list[float], monkeypatch: pytest.MonkeyPatch
):
    """Each try would cost another model its place, and everybody the time of a restore."""
    successor = replay_due.worker("b/1")
    tries: list[TinsmithError] = [Unavailable("the store is away"), *[NotFound("its snapshot is gone")] * 3]

    def restore(lease: Lease) -> None:
        raise tries.pop(0)

    monkeypatch.setattr(successor.owner, "_restore", restore)
    for _ in range(3):
        with pytest.raises(Requeue):
            successor.handle(2, "optim_step")
        now[0] += 3600
    successor.dispatched.clear()
    assert "cannot be restored" in error_of(successor.handle(2, "optim_step"))
    assert successor.dispatched == [], "it has ended"
    now[0] += 3600
    assert (retried(successor), tries) == ([], [])


BREAKS, LACKS_MEMORY = RuntimeError("the device is gone"), NoMemory("full")
failing = pytest.mark.parametrize("error", [BREAKS, LACKS_MEMORY], ids=["breaks", "lacks-memory"])


@failing
def test_a_call_that_has_ended_asks_for_one_restore_only(replay_alone: World, now: list[float], error: Exception):
    worker = replay_alone.worker("b/1")
    NoReplay(worker, error)
    assert worker.handle(1) == replay_alone.oplog.outcome(f"{MODEL}:1") is not None
    replay_alone.client.delete(keys.future(f"{MODEL}:1"))
    assert worker.handle(1, "catch_up") is None, "its result has expired"
    now[0] += 3600.0
    assert [*worker.dispatched, *retried(worker)] == []


@failing
def test_a_restore_whose_failure_counts_for_no_call_is_repeated_after_a_pause(
    replay_alone: World, now: list[float], error: Exception
):
    replay_alone.admit(3, step()[0])
    worker = replay_alone.worker("b/1")
    NoReplay(worker, error)
    for pause in (2.0, 4.0):
        worker.dispatched.clear()
        with pytest.raises(Requeue):
            worker.handle(3)
        assert worker.dispatched == []
        now[0] += pause
        assert retried(worker) == [f"{MODEL}:3"]


def test_memory_that_is_short_in_a_restore_costs_no_other_model_its_state_and_the_call_an_attempt(
    replay_due: World, now: list[float]
):
    other, worker = "session:train:1", replay_due.worker("b/1")
    add_model(replay_due, other)
    worker.runner.handle(f"{other}:0", other, "create_model")
    replay_due.admit(3, step()[0])
    NoReplay(worker, LACKS_MEMORY)
    for pause in (2.0, 4.0, 8.0):
        for seq in (2, 3):
            with pytest.raises(Requeue):
                worker.handle(seq)
        now[0] += pause
        assert retried(worker) == [f"{MODEL}:2"]
        assert list(worker.owner.residents()) == [other]
    assert "3 attempts" in error_of(worker.handle(2, "optim_step"))
    assert f"{MODEL}:3" in [request_id for _, request_id, _ in worker.dispatched], "its turn has come"
    assert list(worker.owner.residents()) == [other]


def test_a_restore_that_breaks_the_whole_backend_counts_as_the_end_of_its_worker(
    replay_due: World, monkeypatch: pytest.MonkeyPatch
):
    for boot in range(3):
        successor = replay_due.worker(f"b/{boot}")
        NoReplay(successor, RuntimeError("the device is gone"))
        with monkeypatch.context() as device, pytest.raises(Ended):
            device.setattr(successor.backend, "_broken", True)
            successor.handle(2, "optim_step")
    assert replay_due.client.hget(f"tinsmith:restore:{MODEL}", "attempts") == b"3"


def test_a_restore_that_met_an_outage_is_no_death(replay_due: World):
    for boot in range(4):
        successor = replay_due.worker(f"b/{boot}")
        NoReplay(successor, redis.ConnectionError("away"))
        with pytest.raises(redis.ConnectionError):
            successor.handle(2, "optim_step")
    assert replay_due.client.hmget(f"tinsmith:restore:{MODEL}", "runner", "attempts") == [None, b"0"]


def test_a_snapshot_that_was_replaced_while_it_was_fetched_is_not_lost(
    replay_due: World, monkeypatch: pytest.MonkeyPatch
):
    successor = replay_due.worker("b/1")

    def replaced(lease: Lease) -> None:
        replay_due.oplog.set_snapshot(lease, lease.applied, "newer")
        raise NotFound("the older one is gone")

    monkeypatch.setattr(successor.owner, "_restore", replaced)
    with pytest.raises(Requeue, match="another worker continued"):
        successor.handle(2, "optim_step")
    assert successor.dispatched == [("optim_step", f"{MODEL}:2", f"train.{BASE}")]
    lease = replay_due.oplog.acquire(MODEL, "c/1")
    assert isinstance(lease, Lease)
    replay_due.oplog.next(lease, 2)
    assert replay_due.client.hget(keys.op(f"{MODEL}:2"), "attempts") == b"0", "nobody died"


def test_a_model_that_cannot_be_restored_is_tried_once_in_a_pause_and_none_of_its_calls_is_lost(
    replay_due: World, now: list[float], monkeypatch: pytest.MonkeyPatch
):
    for seq in (3, 4):
        replay_due.admit(seq, step()[0])
    worker, tries = replay_due.worker("b/1"), list[str]()

    def away(lease: Lease) -> None:
        tries.append(lease.model_id)
        raise Unavailable("the object store is away")

    def arrive() -> None:
        for seq in (3, 2, 4):
            with pytest.raises(Requeue):
                worker.handle(seq)
            assert worker.handle(1) is not None, "the message of an Op that has ended"
            assert not replay_due.client.exists(keys.lease(MODEL)), "another worker may be nearer to the store"

    with monkeypatch.context() as outage:
        outage.setattr(worker.owner, "_restore", away)
        arrive()
        assert len(tries) == 1
        for failed, pause in enumerate([2.0, 4.0], 2):
            now[0] += pause
            assert retried(worker) == [f"{MODEL}:2"]
            arrive()
            assert len(tries) == failed, "its retry alone is tried"
    now[0] += 8.0
    assert retried(worker) == [f"{MODEL}:2"]
    worker.handle(2, "optim_step")
    assert [request_id for _, request_id, _ in worker.dispatched[1:]] == [f"{MODEL}:{seq}" for seq in (2, 3, 4)]


def test_a_model_that_is_here_is_not_held_back(world: World):
    """Its calls need no restore, and a save that was put off delays nobody else."""
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    world.admit(1, step()[0])
    worker.retry_backoff.retry_later(MODEL, 1, "forward_backward")
    assert worker.handle(1) is not None


@pytest.mark.parametrize("ended", [True, False])
def test_what_was_put_off_is_forgotten_once_it_ran_elsewhere_or_its_model_is_no_more(
    world: World, ended: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scheduler, "_FIRST_PAUSE_S", 0.0)
    worker, other = world.worker("a/1"), world.worker("b/1")
    worker.handle(0, "create_model")
    world.admit(1, step()[0])
    worker.retry_backoff.retry_later(MODEL, 1, "forward_backward")
    worker.drain.release()
    worker.owner.discard_all()
    if ended:
        RedisLifecycle(world.client, world.settings).end_model(MODEL)
    else:
        other.handle(1)
        other.owner.discard_all()
    worker.handle(1)
    assert worker.retry_backoff.forget(MODEL) == {}


def test_what_was_put_off_is_forgotten_once_its_model_is_not_even_known(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scheduler, "_FIRST_PAUSE_S", 0.0)
    worker = world.worker("a/1")
    worker.handle(0, "create_model")
    world.admit(1, step()[0])
    worker.retry_backoff.retry_later(MODEL, 1, "forward_backward")
    worker.owner.discard_all()
    RedisLifecycle(world.client, world.settings).end_model(MODEL)
    world.records.delete(Model.namespace, MODEL)
    assert "run has ended" in error_of(worker.handle(1))
    assert worker.retry_backoff.forget(MODEL) == {}


def test_what_was_put_off_is_forgotten_once_its_model_is_owned_elsewhere(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scheduler, "_FIRST_PAUSE_S", 0.0)
    worker = world.worker("a/1")
    world.worker("b/1").handle(0, "create_model")
    world.admit(1, step()[0])
    worker.retry_backoff.retry_later(MODEL, 1, "forward_backward")
    with pytest.raises(Requeue, match="owned by b"):
        worker.handle(1)
    assert worker.retry_backoff.forget(MODEL) == {}
