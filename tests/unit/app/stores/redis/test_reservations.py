"""Room for a checkpoint is reserved before it is made, and no interleaving of calls passes `storage_bytes`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import redis

from app.domain.limits import KEY, PROJECT, Charge, Limits, Payer
from app.domain.records import Checkpoint
from app.errors import LimitReached, Unavailable
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.limits import RedisQuotas
from app.stores.redis.records import RedisRecords, dump
from tests.unit.app.stores.redis.charges import SESSION, SETTINGS, mine, oplog, quotas, stored
from tests.unit.app.stores.redis.test_limits import checkpoint, path

__all__ = ["oplog", "quotas", "stored"]  # the fixtures
HOUR = 3600


def charge(size: int, payers: tuple[Payer, ...] | None = None, most: int = 100) -> Charge:
    return Charge(mine(Limits(storage_bytes=most)) if payers is None else payers, stores=True, stored=size)


def used(quotas: RedisQuotas) -> list[int]:
    return [quotas.used(payer).storage_bytes for payer in mine()]


def test_calls_at_the_same_time_never_pass_the_limit_together(stored: RedisRecords, quotas: RedisQuotas) -> None:
    seen = []

    def import_(number: int) -> bool:
        with suppress(LimitReached):
            quotas.reserve(path(number), charge(30), HOUR)
            seen.append(used(quotas)[0])
            if number % 3 == 0:
                quotas.release(path(number))
                return False
            return stored.put_reserved(path(number), checkpoint(30))
        return False

    with ThreadPoolExecutor(16) as threads:
        made = sum(threads.map(import_, range(200)))
    # The last ones may have come while a reservation that was released later took the room.
    made += sum(import_(number) for number in (1, 2, 4, 5))
    assert max(seen) <= 100
    assert (made, used(quotas)) == (3, [90, 90])


def test_a_checkpoint_counts_instead_of_its_reservation(stored: RedisRecords, quotas: RedisQuotas) -> None:
    quotas.reserve(path("a"), charge(70), HOUR)
    assert used(quotas) == [70, 70]
    assert stored.put_reserved(path("a"), checkpoint(50))
    assert used(quotas) == [50, 50]
    assert not stored.put_reserved(path("a"), checkpoint(60))
    assert used(quotas) == [50, 50]
    stored.delete(Checkpoint.namespace, path("a"))
    assert used(quotas) == [0, 0]


def test_a_checkpoint_is_refused_when_its_reservation_is_gone_or_too_small(
    client: redis.Redis, stored: RedisRecords, quotas: RedisQuotas
) -> None:
    quotas.reserve(path("a"), charge(50), HOUR)
    with pytest.raises(Unavailable, match="expired; try again"):
        stored.put_reserved(path("a"), checkpoint(51))
    quotas.reserve(path("a"), charge(50), HOUR)
    lapse(client)
    with pytest.raises(Unavailable, match="expired; try again"):
        stored.put_reserved(path("a"), checkpoint(50))
    assert stored.get(Checkpoint.namespace, path("a")) is None


def lapse(client: redis.Redis) -> None:
    """The time of all reservations is over."""
    for name in client.zrange("tinsmith:reservations_lapse", 0, -1):
        client.zadd("tinsmith:reservations_lapse", {name: 1})


def test_a_reservation_counts_until_it_is_released_or_lapses(
    client: redis.Redis, stored: RedisRecords, quotas: RedisQuotas
) -> None:
    for name in ("a", "b"):
        quotas.reserve(path(name), charge(50), HOUR)
    with pytest.raises(LimitReached, match="project me has 100 bytes"):
        quotas.reserve(path("c"), charge(1), HOUR)
    quotas.release(path("a"))
    quotas.release(path("a"))
    assert used(quotas) == [50, 50]
    lapse(client)
    quotas.reserve(path("c"), charge(100), HOUR)
    assert used(quotas) == [100, 100]
    quotas.release(path("c"))
    assert client.keys("tinsmith:reserv*") == []


def test_another_reservation_for_a_path_replaces_the_first_unless_it_is_refused(
    stored: RedisRecords, quotas: RedisQuotas
) -> None:
    quotas.reserve(path("a"), charge(80), HOUR)
    quotas.reserve(path("a"), charge(90), HOUR)
    assert used(quotas) == [90, 90]
    with pytest.raises(LimitReached, match="has 0 bytes"):
        quotas.reserve(path("a"), charge(101), HOUR)
    assert used(quotas) == [90, 90]


def test_a_reservation_counts_for_its_own_key_alone(stored: RedisRecords, quotas: RedisQuotas) -> None:
    project, other = Payer(PROJECT, "me", Limits()), Payer(KEY, "other", Limits(storage_bytes=100))
    quotas.reserve(path("a"), charge(80, mine()), HOUR)
    quotas.reserve(path("b"), charge(100, (project, other)), HOUR)
    assert [quotas.used(payer).storage_bytes for payer in (project, other)] == [180, 100]


def test_a_checkpoint_is_its_runs_though_the_session_moves_before_it_is_recorded(
    client: redis.Redis, oplog: RedisOpLog, stored: RedisRecords, quotas: RedisQuotas
) -> None:
    quotas.reserve(path("a"), charge(50), HOUR)
    RedisLifecycle(client, SETTINGS).move(SESSION, "other")
    stored.put_reserved(path("a"), checkpoint(50))
    found = stored.get(Checkpoint.namespace, path("a"))
    assert found is not None and found["owner"] == '"other"'
    assert quotas.used(Payer(PROJECT, "other", Limits())).storage_bytes == 50
    assert used(quotas) == [0, 50]


def test_a_size_is_kept_to_the_byte(stored: RedisRecords, quotas: RedisQuotas) -> None:
    size = 2**53 - 1
    quotas.reserve(path("a"), charge(size, mine()), HOUR)
    assert used(quotas) == [size, size]
    quotas.release(path("a"))
    assert used(quotas) == [0, 0]


def test_a_save_leaves_room_for_what_is_reserved(stored: RedisRecords, quotas: RedisQuotas) -> None:
    stored.put_new(Checkpoint.namespace, path("a"), dump(checkpoint(40)))
    quotas.reserve(path("b"), charge(60), HOUR)
    with pytest.raises(LimitReached, match="has 100 bytes"):
        quotas.take(charge(0))
