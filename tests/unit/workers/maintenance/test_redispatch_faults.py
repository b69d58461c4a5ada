"""Redispatch beside entries that cannot be read, errors with one model, and outages in the middle of a round."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import redis

from app.domain.records import Model, Sampler
from app.domain.results import Result
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords, dump
from app.stores.redis.types import Pending
from workers.maintenance.redispatch import Redispatcher

BROKEN, GOOD = "session:train:0", "session:train:1"
HASTY = EngineSettings(lease_s=3600, ring_again_s=1e-6, gap_s=1e-6)


@pytest.fixture
def oplog(client: redis.Redis) -> RedisOpLog:
    log = RedisOpLog(client, HASTY)
    log.take_calls(600)
    for model_id in (BROKEN, GOOD):
        log.create_model(model_id, dump(Model("me", "session", "base", 0.0)))
    log.admit(BROKEN, 0, "forward", b"", "d")
    log.admit(BROKEN, 1, "forward", b"", "d")
    log.admit(GOOD, 0, "forward", b"", "d")
    client.zadd(keys.PENDING, {BROKEN: 1, GOOD: 2})  # the broken one is the first, and both have waited long
    return log


@pytest.fixture
def dispatched() -> list[str]:
    """The request ids that were dispatched."""
    return []


@pytest.fixture
def redispatcher(oplog: RedisOpLog, client: redis.Redis, dispatched: list[str]) -> Redispatcher:
    return Redispatcher(oplog, lambda *send: dispatched.append(send[1]), HASTY, client)


def throttle(oplog: RedisOpLog, client: redis.Redis) -> None:
    """Leaves a throttled request that no worker dispatches: the one before it has ended."""
    sampler = "s:sample:0"
    RedisRecords(client).put_new(Sampler.namespace, sampler, dump(Sampler("me", "s", "base", 0.0)))
    for seq in range(2):
        oplog.admit_sample(f"{sampler}:{seq}", sampler, "me", "sample.base", b"", "d", sequences=64)
    oplog.finish_sample(f"{sampler}:0", Result(b""))


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda client: client.lpush(keys.lease(BROKEN), "no text"), BROKEN),
        (lambda client: client.hset(keys.model(BROKEN), "applied", "no number"), BROKEN),
        (lambda client: client.zadd(keys.PENDING, {b"\xff": 0}), r"b'\xff'"),
    ],
    ids=["a key of another type", "no number", "no text"],
)
def test_an_entry_that_cannot_be_read_hides_no_other_and_is_logged(
    redispatcher: Redispatcher,
    client: redis.Redis,
    dispatched: list[str],
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[redis.Redis], None],
    name: str,
) -> None:
    spoil(client)
    redispatcher.sweep()
    assert f"{GOOD}:0" in dispatched
    assert name in caplog.text


def test_an_owner_whose_name_cannot_be_read_hides_no_other_model(
    redispatcher: Redispatcher, client: redis.Redis, dispatched: list[str]
) -> None:
    client.set(keys.lease(BROKEN), b"\xff/1")
    redispatcher.sweep()
    assert f"{GOOD}:0" in dispatched


def test_slices_of_entries_that_cannot_be_read_hide_no_other(
    redispatcher: Redispatcher, client: redis.Redis, dispatched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.maintenance.redispatch._SLICE", 2)
    client.zadd(keys.PENDING, {b"\xff%d" % i: 0 for i in range(4)})
    redispatcher.sweep()
    assert f"{GOOD}:0" in dispatched


def break_calls(client: redis.Redis) -> None:
    client.set(keys.op(f"{BROKEN}:1"), "no hash")


def break_gap(client: redis.Redis) -> None:
    """Leaves a gap that cannot be given up."""
    client.delete(keys.op(f"{BROKEN}:0"), keys.journal(BROKEN))
    client.set(keys.journal(BROKEN), "no set")


@pytest.mark.parametrize("spoil", [break_calls, break_gap])
def test_an_error_with_one_model_keeps_no_model_and_no_throttled_request_waiting(
    oplog: RedisOpLog,
    redispatcher: Redispatcher,
    client: redis.Redis,
    dispatched: list[str],
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[redis.Redis], None],
) -> None:
    spoil(client)
    throttle(oplog, client)
    oplog.calls_taken_s()
    client.hset(keys.CALLS_TAKEN, "since", 0)  # the API takes calls since long, so a missing seq is given up
    redispatcher.sweep()
    assert {f"{GOOD}:0", "s:sample:0:1"} <= {*dispatched}
    failed = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.__dict__["request_id"] for record in failed] == [BROKEN]


def lose_later_slices(oplog: RedisOpLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers only the read of the first row."""
    read = oplog.pending

    def pending(limit: int, start: int, depth: int) -> list[Pending]:
        if start:
            raise redis.TimeoutError("Timeout reading from socket")
        return read(limit, start, depth)

    monkeypatch.setattr(oplog, "pending", pending)
    monkeypatch.setattr("workers.maintenance.redispatch._SLICE", 1)


def test_an_outage_in_a_later_slice_drops_nothing_that_was_read(
    oplog: RedisOpLog, redispatcher: Redispatcher, dispatched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_later_slices(oplog, monkeypatch)
    redispatcher.sweep()
    assert dispatched == [f"{BROKEN}:0", f"{BROKEN}:1"]


def test_after_an_outage_a_round_begins_at_the_first_row(
    oplog: RedisOpLog, redispatcher: Redispatcher, dispatched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.maintenance.redispatch._LONGEST_PATIENCE_S", 0.0)
    monkeypatch.setattr("workers.maintenance.redispatch._MOST", 1)
    lose_later_slices(oplog, monkeypatch)
    redispatcher.sweep()
    dispatched.clear()
    with pytest.raises(redis.TimeoutError):
        redispatcher.sweep()
    redispatcher.sweep()
    assert dispatched == [f"{BROKEN}:0", f"{BROKEN}:1"]


def test_an_outage_between_two_models_ends_the_round(
    oplog: RedisOpLog, redispatcher: Redispatcher, dispatched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each of thousands of models would wait for the same server."""

    def waiting(*_: object) -> tuple[str, ...]:
        raise redis.ConnectionError("Connection refused")

    monkeypatch.setattr(oplog, "waiting", waiting)
    with pytest.raises(redis.ConnectionError):
        redispatcher.sweep()
    assert dispatched == []
