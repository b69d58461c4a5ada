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
from workers.maintenance.sessions import SessionExpiry

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
    assert released[0] == [f"{sampler}:0"]


def test_a_session_that_cannot_be_torn_down_keeps_no_other(installation: Installation):
    installation.client.hset(keys.record(Sampler.namespace, f"{SESSION}:sample:0"), "prefix", "{")
    finish(installation, SESSION, OTHER)
    installation.sweep(RETIRING)
    assert installation.ended(OTHER_MODEL)
    assert installation.records.get(Session.namespace, OTHER) is None
    assert installation.records.get(Session.namespace, SESSION)


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
    left = []
    while installation.records.get(Session.namespace, SESSION):
        installation.teardown(RETIRING).retire(SESSION, until=0.0)
        left.append(sum(sampler.startswith(f"{SESSION}:") for sampler in installation.samplers()))
        assert installation.ended(MODEL)
    assert left == [2, 1, 0], "the run, its adapter, and the sampler of a checkpoint"


def test_one_large_session_is_torn_down_in_rounds_that_each_go_on_where_the_last_one_stopped(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop saves an adapter at every step, and only the newest of them have files."""
    given_up, kept = 450, [f"{SESSION}:sample:{number}" for number in (0, 1001, 1002, 1003)]
    for number in range(2, 2 + given_up + 3):
        name = f"{SESSION}:sample:{number if number < 2 + given_up else number + 999 - given_up}"
        sampler = Sampler("me", SESSION, "base", 0.0, prefix=f"models/{MODEL}/sampler_weights/e{number}/{number}-1")
        gone = {} if name in kept else {"given_up": "1"}
        installation.records.put_new(Sampler.namespace, name, dump(sampler) | gone)
        installation.store.put_new(f"{sampler.prefix}/manifest.json", b"{}")
    finish(installation, SESSION)
    clock, passed, listed, lists = time.monotonic, 0.0, installation.store.list, list[str]()

    def list_files(prefix: str) -> list[str]:
        nonlocal passed
        passed += 3
        lists.append(prefix)
        return listed(prefix)

    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed)
    monkeypatch.setattr(installation.store, "list", list_files)
    task, rounds, took = expiry(installation), 0, list[float]()
    while installation.records.get(Session.namespace, SESSION) and rounds < 20:
        before, rounds = passed, rounds + 1
        task.sweep()
        took.append(passed - before)
    assert rounds > 2 and max(took) <= 6
    assert len(lists) == len(kept) + 1, "its snapshots and each adapter that has files"
    left = [key for key in listed(f"models/{MODEL}/sampler_weights/") if "/e" in key]
    assert len(left) == given_up, "the orphans task would delete them: a given-up adapter has none"


def test_the_deletion_of_a_run_lists_no_files_of_given_up_adapters(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2, 452):
        sampler = Sampler("me", SESSION, "base", 0.0, prefix=f"models/{MODEL}/sampler_weights/e{number}/{number}-1")
        name = f"{SESSION}:sample:{number}"
        installation.records.put_new(Sampler.namespace, name, dump(sampler) | {"given_up": "1"})
    listed, lists = installation.store.list, list[str]()

    def list_files(prefix: str) -> list[str]:
        lists.append(prefix)
        return listed(prefix)

    monkeypatch.setattr(installation.store, "list", list_files)
    installation.client.config_resetstat()
    installation.teardown().end(MODEL)
    assert installation.client.info("commandstats")["cmdstat_evalsha"]["calls"] < 15
    assert lists == [f"models/{MODEL}/snapshots/", f"models/{MODEL}/sampler_weights/e/4-1/"]
    assert [id_ for id_ in installation.samplers() if id_.startswith(f"{SESSION}:")] == [f"{SESSION}:sample:1"]
