"""Maintenance jobs run on one worker at a time, and a job that fails does not stop the others."""

from __future__ import annotations

import threading
import time

import pytest
import redis

from app.errors import Unavailable
from app.settings import EngineSettings
from app.stores.redis.journal import RedisOpLog
from workers.maintenance import leader
from workers.maintenance.leader import MaintenanceRunner


class Count:
    def __init__(self, fails: Exception | None = None) -> None:
        self.rounds, self.fails = 0, fails

    def sweep(self) -> None:
        self.rounds += 1
        if self.fails:
            raise self.fails


@pytest.fixture
def oplog(client: redis.Redis) -> RedisOpLog:
    return RedisOpLog(client, EngineSettings(lease_s=60))


def test_only_the_leader_runs_a_task(oplog):
    tasks = Count(), Count()
    for worker, task in zip(("w/1", "w/2"), tasks, strict=True):
        MaintenanceRunner(oplog, {"task": task}, worker).sweep()
    assert [task.rounds for task in tasks] == [1, 0]


def test_a_leader_that_stops_is_followed_at_once_and_leads_no_more(oplog):
    tasks = Count(), Count()
    first, second = (
        MaintenanceRunner(oplog, {"task": task}, worker) for worker, task in zip(("w/1", "w/2"), tasks, strict=True)
    )
    first.sweep()
    second.stop()  # it leads nothing
    first.sweep()
    first.stop()
    first.sweep()
    MaintenanceRunner(oplog, {"task": tasks[1]}, "w/2").sweep()
    assert [task.rounds for task in tasks] == [2, 1]


@pytest.mark.parametrize(("error", "tries"), [(redis.ConnectionError("gone"), 1), (Unavailable("no replica"), 2)])
def test_a_worker_stops_while_the_state_server_or_its_replica_is_away(oplog, monkeypatch, error, tries):
    made, releases = MaintenanceRunner(oplog, {"task": Count(), "other": Count()}, "w/1"), Count(error)
    monkeypatch.setattr(oplog, "release", lambda *_: releases.sweep())
    made.stop()
    assert releases.rounds == tries, "a server that is away is not waited for again"


@pytest.mark.parametrize(
    "error", [redis.ConnectionError("gone"), Unavailable("down"), OSError("full"), ValueError("a fault of ours")]
)
def test_a_task_that_fails_keeps_no_other_from_running_and_is_tried_again(oplog, error):
    failing, other = Count(error), Count()
    made = MaintenanceRunner(oplog, {"failing": failing, "other": other}, "w/1")
    made.sweep()
    made.sweep()
    assert (failing.rounds, other.rounds) == (2, 2)


def test_a_task_that_hangs_keeps_no_other_from_running(oplog, monkeypatch):
    monkeypatch.setattr(leader, "_PERIOD_S", 0.01)
    free, other = threading.Event(), Count()

    class Hanging:
        def sweep(self) -> None:
            free.wait()

    made = MaintenanceRunner(oplog, {"hanging": Hanging(), "other": other}, "w/1")
    made.start()
    try:
        deadline = time.monotonic() + 60
        while other.rounds < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert other.rounds >= 3
    finally:
        free.set()
        made.stop()
