"""A replica that lacks the newest writes is promoted: nothing of the lost end of that history is taken for its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import redis

from app.domain.records import Model, Sampler
from app.errors import Fenced
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.client import connect
from app.stores.redis.completions import RedisCompletions
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords, dump
from app.stores.redis.sentinel import check_primary
from app.stores.redis.types import Lease
from tests.sentinels import AT_ONCE, start_replica
from tests.servers import free_port, start_valkey
from tests.unit.app.stores.redis.journal_steps import MODEL, OK, admit, commit_through, own

SNAPSHOT = f"models/{MODEL}/snapshots/0/0-1"
Promote = Callable[[int], RedisOpLog]


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """A primary and two replicas."""
    ports = [free_port() for _ in range(3)]
    with ExitStack() as servers:
        folder = tmp_path_factory.mktemp("promotion")
        urls = [servers.enter_context(start_valkey(folder / "0", ports[0], options=AT_ONCE))]
        urls += [servers.enter_context(start_replica(folder / str(port), [ports[0], port])) for port in ports[1:]]
        yield urls


@pytest.fixture
def servers(urls: list[str]) -> Iterator[list[redis.Redis]]:
    """The servers, empty, and replicas of the first one again."""
    with ExitStack() as clients:
        servers = [clients.enter_context(connect(url)) for url in urls]
        servers[0].flushall()
        port = str(servers[0].connection_pool.connection_kwargs["port"])
        for server in servers[1:]:
            server.replicaof("127.0.0.1", port)
        await_replicas(servers)
        yield servers


@pytest.fixture
def before(servers: list[redis.Redis], urls: list[str]) -> Iterator[RedisOpLog]:
    """The journal on the first primary, with one model."""
    with checking(urls[0]) as client:
        log = oplog(client)
        log.create_model(MODEL, dump(Model("me", "session", "base", 0.0)))
        yield log


@pytest.fixture
def promote(servers: list[redis.Redis], urls: list[str]) -> Iterator[Promote]:
    """Makes a replica a primary, and returns the journal there: what comes to the first primary later is lost."""
    with ExitStack() as clients:

        def begin(number: int) -> RedisOpLog:
            time.sleep(0.05)  # histories differ by their ms, and each owner of a model takes one
            await_replicas(servers[:1] + servers[number:])
            servers[number].replicaof("NO", "ONE")
            return oplog(clients.enter_context(checking(urls[number])))

        yield begin


def checking(url: str) -> redis.Redis:
    """A client like that of a service behind sentinels."""
    return redis.Redis.from_url(url, redis_connect_func=check_primary)


def oplog(client: redis.Redis) -> RedisOpLog:
    return RedisOpLog(client, EngineSettings(lease_s=60))


def await_replicas(servers: list[redis.Redis]) -> None:
    deadline = time.monotonic() + 120
    while any(server.info("replication")["master_link_status"] != "up" for server in servers[1:]):
        assert time.monotonic() < deadline, "the replicas do not follow"
        time.sleep(0.02)
    servers[0].set("mark", time.time_ns())
    assert servers[0].wait(len(servers) - 1, 60_000) >= len(servers) - 1


def test_an_owner_before_the_promotion_can_neither_begin_nor_commit_anything(before: RedisOpLog, promote: Promote):
    lease = own(before)
    admit(before, 0)
    admit(before, 1)
    commit_through(before, lease, 0)
    after = promote(1)
    with pytest.raises(Fenced):
        after.next(lease, 1)
    with pytest.raises(Fenced):
        after.commit(lease, 1, OK)
    with pytest.raises(Fenced):
        after.begin_restore(lease)
    with pytest.raises(Fenced):
        after.set_snapshot(lease, 0, SNAPSHOT)
    assert after.renew([MODEL], lease.worker) == [MODEL]


def test_no_owner_has_to_wait_for_one_before_the_promotion(before: RedisOpLog, promote: Promote):
    own(before, "a/1")
    after = promote(1)
    lease = own(after, "b/1")
    assert after.renew([MODEL], "b/1") == []
    admit(after, 0)
    commit_through(after, lease, 0)
    assert after.set_snapshot(lease, 0, SNAPSHOT) == ""


def test_an_epoch_of_the_lost_history_is_never_given_out_again_and_its_snapshots_are_not_used(
    before: RedisOpLog, promote: Promote
):
    own(before, "a/1")
    after = promote(1)
    lost = [own(before, f"a/{boot}").epoch for boot in range(2, 9)]
    leases = [own(after, f"a/{boot}") for boot in range(9, 12)]
    assert min(lease.epoch for lease in leases) > max(lost)
    assert {lease.epoch_floor for lease in leases} == {leases[0].epoch}, "files of an older epoch are of a lost history"


def test_a_rebuilt_run_keeps_that_promise(before: RedisOpLog, promote: Promote, servers: list[redis.Redis]):
    far = time.time_ns() // 1_000_000 + 2**20  # a rebuild goes that far beyond the epochs it finds
    RedisRecords(servers[0]).update(Model.namespace, MODEL, {"epoch": str(far), "epoch_floor": str(far)})
    after = promote(1)
    lost = [own(before, f"a/{boot}").epoch for boot in range(2, 9)]
    assert own(after, "a/9").epoch > max(lost)


def test_a_model_that_was_made_in_the_lost_history_does_not_begin_with_its_epochs(before: RedisOpLog, promote: Promote):
    after, again = promote(1), "session:train:1"
    logs = [before, after]
    leases = []
    for log in logs:
        log.create_model(again, dump(Model("me", "session", "base", 0.0)))
        leases.append(log.acquire(again, "a/1"))
    lost, lease = leases
    assert isinstance(lost, Lease)
    assert isinstance(lease, Lease)
    assert lease.epoch > lost.epoch


def test_a_history_that_was_lost_itself_does_not_come_again(before: RedisOpLog, promote: Promote):
    own(before)
    first, second = promote(1), promote(2)
    lost = own(first)
    assert own(second).epoch > lost.epoch


def test_a_primary_whose_clock_is_behind_gives_out_no_epoch_again(
    before: RedisOpLog, promote: Promote, servers: list[redis.Redis]
):
    ahead = time.time_ns() // 1_000_000 + 3_600_000
    servers[0].hset(keys.PREFIX + "history", "number", ahead)
    own(before, "a/1")
    after = promote(1)
    lost = [own(before, f"a/{boot}").epoch for boot in range(2, 9)]
    assert own(after, "a/9").epoch > max(lost)


def test_the_same_primary_fences_nobody_when_connections_are_made_again(before: RedisOpLog, urls: list[str]):
    lease = own(before)
    admit(before, 0)
    with checking(urls[0]) as client:
        assert oplog(client).renew([MODEL], lease.worker) == []
        oplog(client).commit(lease, 0, OK)
        assert own(oplog(client)).epoch == lease.epoch


def test_a_request_that_runs_on_a_sampler_keeps_its_lease(
    before: RedisOpLog, promote: Promote, servers: list[redis.Redis]
):
    RedisRecords(servers[0]).put_new(Sampler.namespace, "s:sample:0", dump(Sampler("me", "s", "base", 0.0)))
    before.admit_sample("s:sample:0:0", "s:sample:0", "me", "sample.base", b"payload", "digest")
    before.claim_sample("s:sample:0:0", "a/1")
    assert promote(1).renew(["s:sample:0:0"], "a/1") == []


def test_a_client_that_polls_for_all_its_samples_is_told_of_those_after_the_promotion(
    before: RedisOpLog, promote: Promote, servers: list[redis.Redis]
):
    RedisRecords(servers[0]).put_new(Sampler.namespace, "s:sample:0", dump(Sampler("me", "s", "base", 0.0)))
    for seq in range(4):
        before.admit_sample(f"s:sample:0:{seq}", "s:sample:0", "me", "sample.base", b"payload", "digest")
    after = promote(1)
    for seq in range(2):
        before.finish_sample(f"s:sample:0:{seq}", OK)
    _, cursor = RedisCompletions(servers[0], EngineSettings()).since("s:sample:0/0", 0)
    for seq in (2, 3, 0):
        after.finish_sample(f"s:sample:0:{seq}", OK)
    found, _ = RedisCompletions(servers[1], EngineSettings()).since("s:sample:0/0", cursor)
    assert [one.request_id for one in found] == [f"s:sample:0:{seq}" for seq in (2, 3, 0)]
