"""Watchdog of a worker: the time at which it counts as unresponsive, on a clock and a dispatch of the test's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import redis

from workers.process import liveness
from workers.process.liveness import Watchdog
from workers.process.runtime import Runtime

HEALTHY_S = 30.0
BEAT_S = HEALTHY_S / 10


@dataclass
class Worker:
    """Handles a tick when a test asks for it. `waiting` None: the broker is away; `full`: the broker accepts
    nothing."""

    waiting: int | None = 0
    full: bool = False
    sound: bool = True
    now: float = 1000.0
    sent: int = 0
    ended: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watchdog = Watchdog(_TickSender(self), lambda: self.sound, HEALTHY_S, self.ended.append)

    def lasts(self, seconds: float, *, answers: bool = False) -> None:
        for _ in range(round(seconds / BEAT_S)):
            self.now += BEAT_S
            self.watchdog.check()
            if answers and self.waiting:
                self.answer()

    def answer(self) -> None:
        self.waiting = 0
        self.watchdog.answered()


@dataclass
class _TickSender:
    worker: Worker

    def waiting(self) -> int | None:
        return self.worker.waiting

    def send(self) -> bool:
        if self.worker.full:
            return False
        self.worker.sent += 1
        self.worker.waiting = 1
        return True


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    made: list[Worker] = []
    monkeypatch.setattr(liveness.time, "monotonic", lambda: made[0].now if made else 1000.0)
    made.append(Worker())
    return made[0]


def test_a_worker_that_answers_is_healthy_and_dispatched_at_every_beat(worker: Worker):
    worker.lasts(300, answers=True)
    assert worker.watchdog.healthy()
    assert worker.sent == 100
    assert worker.ended == []


def test_an_unresponsive_worker_is_unhealthy_and_then_ends(worker: Worker):
    worker.lasts(HEALTHY_S)
    assert worker.watchdog.healthy()
    worker.lasts(BEAT_S)
    assert not worker.watchdog.healthy()
    assert worker.ended == []
    worker.lasts(HEALTHY_S)
    assert len(worker.ended) >= 1


def test_never_more_than_one_tick_waits(worker: Worker):
    worker.lasts(2 * HEALTHY_S)
    assert worker.sent == 1


def test_a_tick_is_dispatched_behind_whatever_else_waits_in_the_queue(worker: Worker):
    worker.waiting = 7
    worker.lasts(BEAT_S)
    assert worker.sent == 1


def test_a_tick_that_was_lost_is_dispatched_again(worker: Worker):
    worker.lasts(BEAT_S)
    worker.waiting = 0  # the broker lost the tick
    worker.lasts(HEALTHY_S / 2)
    assert worker.sent == 1, "it may be underway"
    worker.lasts(BEAT_S, answers=True)
    assert worker.sent == 2
    assert worker.watchdog.healthy()


def test_a_worker_that_does_something_counts_as_responsive(worker: Worker):
    with worker.watchdog.working():
        worker.lasts(10 * HEALTHY_S)
        assert worker.watchdog.healthy()
    worker.lasts(HEALTHY_S)
    assert worker.watchdog.healthy()
    assert worker.ended == []
    worker.lasts(2 * HEALTHY_S)
    assert worker.ended


def test_a_broker_that_is_away_is_not_the_workers_fault(worker: Worker):
    worker.waiting = None
    worker.lasts(10 * HEALTHY_S)
    assert worker.watchdog.healthy()
    worker.waiting = 0
    worker.lasts(HEALTHY_S)
    assert worker.watchdog.healthy(), "it has had no time to connect again"
    worker.lasts(2 * HEALTHY_S)
    assert worker.ended, "but it must"


def test_a_broker_that_takes_nothing_is_not_the_workers_fault(worker: Worker):
    worker.lasts(BEAT_S, answers=True)
    worker.full = True
    worker.lasts(10 * HEALTHY_S)
    assert worker.watchdog.healthy()
    worker.full = False
    worker.lasts(3 * HEALTHY_S)
    assert worker.ended, "it is sent another tick, and does not hear it"


def test_a_worker_that_was_stopped_itself_counts_as_responsive(worker: Worker):
    worker.lasts(BEAT_S)
    worker.now += 100 * HEALTHY_S
    worker.watchdog.check()
    assert worker.watchdog.healthy()
    assert worker.ended == []


def test_a_worker_whose_engine_is_of_no_use_ends_at_once(worker: Worker):
    worker.sound = False
    assert not worker.watchdog.healthy()
    worker.lasts(BEAT_S)
    assert worker.ended


def test_a_tick_while_the_state_server_is_away_is_answered_and_one_line(
    worker: Worker, caplog: pytest.LogCaptureFixture
):
    def on_tick() -> None:
        raise redis.ConnectionError("no sentinel names a primary of 'service'")

    absent: Any = None
    runtime = Runtime(absent, absent, "", absent, worker.watchdog, absent, on_tick, absent)
    for _ in range(3):
        worker.lasts(BEAT_S)
        worker.waiting = 0
        runtime.tick()
    assert worker.sent == 3, "the next tick does not wait until this one counts as lost"
    assert [(record.getMessage(), record.exc_info) for record in caplog.records] == [
        ("a tick failed, because the state server is away: no sentinel names a primary of 'service'", None)
    ] * 3
