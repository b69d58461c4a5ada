"""Payloads and results move to the object store, and one that cannot be moved holds up no other."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
import redis

from app.domain.records import Model
from app.domain.results import Result
from app.errors import Unavailable
from app.settings import EngineSettings
from app.stores.objects.folder import FolderStore
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.payloads import RedisPayloads
from app.stores.redis.records import dump
from app.stores.redis.types import Lease
from tests.unit.away_store import AwayStore
from workers.maintenance.spilling import PayloadSpilling

MODEL = "session:train:0"
KB = 1024
SETTINGS = EngineSettings(payload_budget_bytes=400 * KB, spill_bytes=100 * KB)


@pytest.fixture
def store(tmp_path: Path) -> AwayStore:
    return AwayStore(tmp_path, "secret", "http://x")


@pytest.fixture
def oplog(client: redis.Redis, store: AwayStore) -> RedisOpLog:
    log = RedisOpLog(client, SETTINGS, store)
    assert log.create_model(MODEL, dump(Model("me", "session", "base", 0.0)))
    return log


@pytest.fixture
def spilling(client: redis.Redis, store: AwayStore) -> PayloadSpilling:
    return PayloadSpilling(RedisPayloads(client, SETTINGS, store))


def admit(oplog: RedisOpLog, seq: int, size: int) -> None:
    oplog.admit(MODEL, seq, "forward_backward", bytes([seq]) * size, f"digest {seq}")


def test_what_is_over_half_the_budget_moves_so_that_more_can_come_in(oplog, spilling, store, client):
    for seq in range(40):
        admit(oplog, seq, 90 * KB)
        spilling.sweep()
    assert int(client.get("tinsmith:payload_bytes")) <= 200 * KB
    assert len(store.list("payloads")) == 38
    lease = oplog.acquire(MODEL, "a/1")
    assert isinstance(lease, Lease)
    for seq in range(40):
        assert oplog.next(lease, seq).payload == bytes([seq]) * 90 * KB
        oplog.commit(lease, seq, Result(b"{}"))
    oplog.set_snapshot(lease, 39, "s")
    spilling.sweep()
    assert (store.list("payloads"), client.keys("*spill*")) == ([], [])


def test_with_the_store_away_only_what_is_over_the_budget_waits_until_it_is_back(oplog, spilling, store):
    store.away = True
    for seq in range(4):
        admit(oplog, seq, 90 * KB)
    with pytest.raises(Unavailable):
        spilling.sweep()
    with pytest.raises(Unavailable):
        admit(oplog, 4, 90 * KB)
    lease = oplog.acquire(MODEL, "a/1")
    oplog.commit(lease, 0, Result(b"{}"))
    assert oplog.next(lease, 1).payload == b"\1" * 90 * KB, "training goes on"
    store.away = False
    spilling.sweep()
    admit(oplog, 4, 90 * KB)
    assert len(store.list("payloads")) == 2


class Stubborn(FolderStore):
    """Refuses to write or delete some objects, by a part of their names."""

    refused: ClassVar[list[str]] = []

    def put_new(self, key: str, source: Path | bytes) -> bool:
        self._check([key])
        return super().put_new(key, source)

    def delete(self, keys: Iterable[str]) -> None:
        listed = list(keys)
        self._check(listed)
        super().delete(listed)

    def _check(self, keys: Iterable[str]) -> None:
        if any(part in key for key in keys for part in self.refused):
            raise Unavailable("the folder belongs to another user")


@pytest.fixture
def stubborn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stubborn:
    monkeypatch.setattr(Stubborn, "refused", [])
    return Stubborn(tmp_path, "secret", "http://x")


def test_an_object_that_cannot_be_deleted_keeps_nothing_from_moving(oplog, client, stubborn):
    admit(oplog, 0, 200 * KB)
    client.sadd(keys.SPILL_GARBAGE, "payloads/stuck/a")
    stubborn.refused.append("stuck")
    with pytest.raises(Unavailable):
        PayloadSpilling(RedisPayloads(client, SETTINGS, stubborn)).sweep()
    assert len(stubborn.list("payloads")) == 1


def test_an_object_that_cannot_be_deleted_keeps_no_other_and_is_named(client, stubborn):
    names = [f"payloads/{name}/a" for name in ("stuck", "old", "older", "oldest")]
    for name in names:
        stubborn.put_new(name, b"x")
    client.sadd(keys.SPILL_GARBAGE, *names)
    stubborn.refused.append("stuck")
    payloads = RedisPayloads(client, SETTINGS, stubborn)
    with pytest.raises(Unavailable, match="payloads/stuck/a cannot be deleted: the folder belongs to another user"):
        payloads.remove_garbage()
    assert stubborn.list("payloads") == ["payloads/stuck/a"]
    assert client.smembers(keys.SPILL_GARBAGE) == {b"payloads/stuck/a"}
    stubborn.refused.clear()
    assert payloads.remove_garbage() == 1


def test_objects_that_cannot_be_deleted_keep_no_other_for_ever(client, stubborn):
    """They are as many as a round tries, and come before the other one."""
    stubborn.put_new("payloads/old/a", b"x")
    client.sadd(keys.SPILL_GARBAGE, *(f"payloads/stuck{number}/a" for number in range(3)))
    client.sadd(keys.SPILL_GARBAGE, "payloads/old/a")
    stubborn.refused.append("stuck")
    payloads = RedisPayloads(client, SETTINGS, stubborn)
    for _ in range(60):
        with pytest.raises(Unavailable):
            payloads.remove_garbage()
    assert stubborn.list("payloads") == []


def test_a_store_that_is_away_is_not_asked_for_each_object(client, stubborn, monkeypatch):
    client.sadd(keys.SPILL_GARBAGE, *(f"payloads/stuck{number}/a" for number in range(20)))
    asked = mock.Mock(side_effect=Unavailable("the store is away"))
    monkeypatch.setattr(stubborn, "delete", asked)
    with pytest.raises(Unavailable):
        RedisPayloads(client, SETTINGS, stubborn).remove_garbage()
    assert asked.call_count == 1 + 3


def test_a_payload_that_cannot_be_moved_keeps_neither_others_nor_results_nor_garbage(oplog, client, stubborn):
    lease = oplog.acquire(MODEL, "a/1")
    admit(oplog, 0, 1)
    oplog.commit(lease, 0, Result(b"x" * SETTINGS.result_spill_bytes))
    for seq in (1, 2, 3):
        admit(oplog, seq, 101 * KB)
    stubborn.put_new("payloads/old/a", b"x")
    client.sadd(keys.SPILL_GARBAGE, "payloads/old/a")
    stubborn.refused.append(f"payloads/{MODEL}:1/")
    spilling = PayloadSpilling(RedisPayloads(client, SETTINGS, stubborn))
    for _ in range(2):
        with pytest.raises(Unavailable):
            spilling.sweep()
    moved = [key.rpartition("/")[0] for key in stubborn.list("")]
    assert moved == [f"payloads/{MODEL}:2", f"payloads/{MODEL}:3", f"results/{MODEL}:0"]
    stubborn.refused.clear()
    spilling.sweep()
    assert len(stubborn.list("payloads")) == 3
