"""Teardown that is slow or fails keeps neither the samples of others nor the teardown of other sessions waiting."""

from __future__ import annotations

import time

import pytest

from app.domain.records import Model, Sampler, Session
from app.errors import Unavailable
from app.stores.redis import keys
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import dump
from tests.unit.workers.maintenance.test_sessions import (
    HOUR_MS,
    MODEL,
    OTHER,
    OTHER_MODEL,
    PATIENT,
    SESSION,
    Installation,
    installation,
    now_ms,
    take_calls,
)
from workers.maintenance.leader import SessionExpiry

__all__ = ["installation"]

RETIRING = PATIENT.model_copy(update={"retain_s": 0.001})


def finish(installation: Installation, *sessions: str) -> None:
    """Finishes sessions long ago, in this order."""
    for moment, session in enumerate(sessions, 1):
        installation.teardown().finish(session, "success")
        installation.client.zadd(keys.SESSIONS_ENDED, {session: moment})


def three_runs(installation: Installation) -> list[str]:
    """Adds runs to SESSION, which then has these three."""
    runs = [MODEL, f"{SESSION}:train:1", f"{SESSION}:train:2"]
    for run in runs[1:]:
        installation.oplog.create_model(run, dump(Model("me", SESSION, "base", 0.0)))
    return runs


def expiry(installation: Installation) -> SessionExpiry:
    """One leader's task, which keeps its pauses over several rounds."""
    lifecycle = RedisLifecycle(installation.client, RETIRING)
    teardown = installation.teardown(RETIRING)
    return SessionExpiry(installation.oplog, lifecycle, installation.records, teardown, RETIRING.session_s)


def test_the_samples_of_a_client_that_is_back_wait_for_no_teardown(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
):
    sampler, released = f"{OTHER}:sample:0", []
    installation.oplog.admit_sample(f"{sampler}:0", sampler, "me", "sample.base", b"ask", "d")
    installation.client.zadd(keys.SESSIONS_HEARD, {OTHER: now_ms(installation.client) - 90_000})
    take_calls(installation.client, HOUR_MS)
    installation.sweep(PATIENT)
    RedisLifecycle(installation.client, PATIENT).heartbeat(OTHER)
    finish(installation, SESSION)

    def list_files(_: str) -> list[str]:
        released.append([request for request, _ in installation.oplog.release_samples("sample.base")])
        raise Unavailable("it takes long")

    monkeypatch.setattr(installation.store, "list", list_files)
    installation.sweep(RETIRING)
    assert released == [[f"{sampler}:0"]]


def test_a_session_that_cannot_be_torn_down_keeps_no_other(installation: Installation):
    installation.client.hset(keys.record(Sampler.namespace, f"{SESSION}:sample:0"), "prefix", "{")
    finish(installation, SESSION, OTHER)
    installation.sweep(RETIRING)
    assert installation.ended(OTHER_MODEL)
    assert installation.records.get(Session.namespace, OTHER) is None
    assert not installation.ended(MODEL)


def test_while_the_object_store_hangs_a_round_tears_down_one_run_and_the_next_comes_much_later(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
):
    """Otherwise everybody's samples would be neither paused nor resumed for hours."""
    runs = three_runs(installation)
    RedisLifecycle(installation.client, PATIENT).end_model(OTHER_MODEL)
    finish(installation, SESSION, OTHER)
    clock, passed = time.monotonic, 0.0

    def list_files(_: str) -> list[str]:
        nonlocal passed
        passed += 180
        raise Unavailable("it hangs")

    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed)
    monkeypatch.setattr(installation.store, "list", list_files)
    task, ended = expiry(installation), []
    for pause in (0, 60, 7200):
        passed += pause
        task.sweep()
        ended.append(sum(installation.ended(run) for run in runs))
    assert ended == [1, 1, 2]
    assert installation.records.get(Session.namespace, OTHER), "nothing else is torn down in a round that took long"


def test_rounds_that_only_have_much_to_tear_down_follow_each_other_without_a_pause(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = three_runs(installation)
    finish(installation, SESSION)
    clock, passed, listed = time.monotonic, 0.0, installation.store.list

    def list_files(prefix: str) -> object:
        nonlocal passed
        passed += 3
        return listed(prefix)

    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed)
    monkeypatch.setattr(installation.store, "list", list_files)
    task, ended = expiry(installation), []
    for _ in range(3):
        task.sweep()
        ended.append(sum(installation.ended(run) for run in runs))
    assert ended[0] < 3 and ended[-1] == 3


def test_a_part_of_a_session_is_torn_down_however_long_it_took_to_find_it(installation: Installation) -> None:
    finish(installation, SESSION)
    assert not installation.ended(MODEL)
    installation.teardown(RETIRING).retire(SESSION, until=0.0)
    assert installation.ended(MODEL)
